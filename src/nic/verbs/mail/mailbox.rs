//! One mailbox: the frames, credits and buffers of one message queue pair.

use rdma_core_sys::{ibv_qp, ibv_sge};

use super::wire::{self, Head, Id, CREDIT, DATA, HEAD, PROOF};
use super::{vendor, MailError, MailSetup, MAIL_BUFFER, MAIL_LEAST, MAIL_RECEIVES, MAIL_SENDS};
use crate::nic::Closed;

/// Every so many sends one is signalled, so that the buffers of all before it come back.
const SIGNAL_EVERY: u32 = 4;
/// So few buffers left: every send is signalled.
const FEW: u32 = 4;

const _: () = {
    assert!(MAIL_SENDS.is_power_of_two() && MAIL_SENDS <= 128);
    assert!(MAIL_RECEIVES <= 16 && MAIL_SENDS >= 2 * SIGNAL_EVERY);
    // With half of 1 two idle sides would answer each other's bare credits for ever.
    assert!(MAIL_LEAST >= 4 && MAIL_LEAST >= FEW);
    assert!(MAIL_BUFFER - HEAD <= u16::MAX as usize);
};

/// Received frames that have bytes left, oldest first.
#[derive(Clone, Copy, Debug)]
struct Inbox {
    buffer: [u8; MAIL_RECEIVES as usize],
    len: [u16; MAIL_RECEIVES as usize],
    first: usize,
    count: usize,
    /// Bytes taken from the oldest.
    taken: usize,
}

impl Inbox {
    const EMPTY: Inbox = Inbox {
        buffer: [0; MAIL_RECEIVES as usize],
        len: [0; MAIL_RECEIVES as usize],
        first: 0,
        count: 0,
        taken: 0,
    };

    /// Adds a frame. There is room: each buffer is in here once at most.
    fn push(&mut self, buffer: u8, len: u16) {
        let at = (self.first + self.count) % MAIL_RECEIVES as usize;
        self.buffer[at] = buffer;
        self.len[at] = len;
        self.count += 1;
    }

    fn front(&self) -> Option<(u8, usize)> {
        (self.count > 0).then(|| (self.buffer[self.first], self.len[self.first].into()))
    }

    fn pop(&mut self) {
        self.first = (self.first + 1) % MAIL_RECEIVES as usize;
        self.count -= 1;
        self.taken = 0;
    }
}

/// One message queue pair's state. Touched by the holder of the message token only (I2).
#[derive(Debug)]
pub(super) struct Mailbox {
    index: u32,
    epoch: u32,
    open: bool,
    qp: *mut ibv_qp,
    memory: *mut u8,
    lkey: u32,
    inline: u32,
    /// Own receives, own send buffers, and the peer's receives.
    receives: u32,
    sends: u32,
    window: u32,
    cookie: [u8; 16],
    expected: [u8; 16],
    // Sending. Buffers are used in turn; those of the frames `done..sent` are the NIC's.
    sent: u32,
    done: u32,
    /// Number behind the last frame that was signalled.
    marked: u32,
    credits: u32,
    greeted: bool,
    greeting_done: bool,
    // Receiving.
    posted: u32,
    next: u32,
    owed: u32,
    known: bool,
    inbox: Inbox,
    broken: Option<u32>,
    /// The frame that goes out now is to tell whether the link works.
    probing: bool,
}

impl Mailbox {
    pub(super) const fn new(index: u32) -> Mailbox {
        Mailbox {
            index,
            epoch: 0,
            open: false,
            qp: core::ptr::null_mut(),
            memory: core::ptr::null_mut(),
            lkey: 0,
            inline: 0,
            receives: MAIL_RECEIVES,
            sends: MAIL_SENDS,
            window: MAIL_RECEIVES,
            cookie: [0; 16],
            expected: [0; 16],
            sent: 0,
            done: 0,
            marked: 0,
            credits: 0,
            greeted: false,
            greeting_done: false,
            posted: 0,
            next: 0,
            owed: 0,
            known: false,
            inbox: Inbox::EMPTY,
            broken: None,
            probing: false,
        }
    }

    pub(super) const fn epoch(&self) -> u32 {
        self.epoch
    }

    pub(super) const fn is_open(&self) -> bool {
        self.open
    }

    /// Completions that it may have in its queue at once.
    pub(super) const fn entries(&self) -> u32 {
        self.receives + self.sends
    }

    /// Takes over a queue pair, posts all receives and, when it leads, sends the proof.
    ///
    /// # Safety
    /// See [`super::Post::connect`].
    pub(super) unsafe fn open(&mut self, setup: &MailSetup) -> Result<(), MailError> {
        *self = Mailbox {
            epoch: self.epoch,
            open: true,
            qp: setup.qp,
            memory: setup.memory,
            lkey: setup.lkey,
            inline: setup.inline,
            receives: setup.receives,
            sends: setup.sends,
            window: setup.window,
            cookie: setup.cookie,
            expected: setup.expected,
            credits: setup.window,
            ..Mailbox::new(self.index)
        };
        let failed = |call| move |errno| MailError::Post { call, errno };
        (0..setup.receives as u8)
            .try_for_each(|buffer| self.post_receive(buffer))
            .map_err(failed("ibv_post_recv"))?;
        if setup.lead {
            self.greet().map_err(failed("ibv_post_send"))?;
        }
        Ok(())
    }

    /// Forgets the queue pair. Its completions are of an old epoch from here on.
    pub(super) fn close(&mut self) {
        *self = Mailbox { epoch: self.epoch.wrapping_add(1), ..Mailbox::new(self.index) };
    }

    /// Sends the proof: the cookie, and padding up to a whole buffer. `Err`: errno.
    fn greet(&mut self) -> Result<(), u32> {
        self.greeted = true;
        let cookie = self.cookie;
        let (first, padding) = self.send_buffer()[HEAD..].split_at_mut(cookie.len());
        first.copy_from_slice(&cookie);
        padding.fill(0);
        self.post_send(PROOF, (MAIL_BUFFER - HEAD) as u16)
    }

    /// True once both cookies arrived as far as this side can know; false when that cannot happen.
    pub(super) const fn proof(&self) -> Option<bool> {
        if self.broken.is_some() {
            return Some(false);
        }
        if self.known && self.greeting_done {
            Some(true)
        } else {
            None
        }
    }

    /// True when [`Mailbox::receive`] would not say 0.
    pub(super) const fn is_ready(&self) -> bool {
        self.inbox.count > 0 || self.broken.is_some()
    }

    const fn id(&self, receive: bool, buffer: u8) -> Id {
        Id { mailbox: self.index, epoch: self.epoch as u16, receive, buffer }
    }

    fn sge(&self, buffer: u32, len: usize) -> ibv_sge {
        let at = self.memory.wrapping_add(buffer as usize * MAIL_BUFFER);
        ibv_sge { addr: at.addr() as u64, length: len as u32, lkey: self.lkey }
    }

    /// The buffer of the next frame. The caller made sure that one is free.
    fn send_buffer(&mut self) -> &mut [u8] {
        let at = (MAIL_RECEIVES + self.sent % self.sends) as usize * MAIL_BUFFER;
        // SAFETY: V30: a send buffer of an open mailbox that is not the NIC's, so it is ours.
        unsafe { core::slice::from_raw_parts_mut(self.memory.add(at), MAIL_BUFFER) }
    }

    /// A receive buffer that holds a frame. The caller made sure that it is not posted.
    fn receive_buffer(&self, buffer: u8) -> &[u8] {
        let at = usize::from(buffer) * MAIL_BUFFER;
        // SAFETY: V30: its receive has completed and was not posted again, so it is ours.
        unsafe { core::slice::from_raw_parts(self.memory.add(at), MAIL_BUFFER) }
    }

    fn free_sends(&self) -> u32 {
        self.sends - self.sent.wrapping_sub(self.done)
    }

    fn post_receive(&mut self, buffer: u8) -> Result<(), u32> {
        let sge = self.sge(buffer.into(), MAIL_BUFFER);
        // SAFETY: V30: the buffer's bytes were taken, and nobody looks at it until it completes.
        unsafe { wire::receive(self.qp, sge, self.id(true, buffer)) }?;
        self.posted |= 1 << buffer;
        Ok(())
    }

    /// Gives a buffer whose frame was taken back to the NIC.
    fn recycle(&mut self, buffer: u8) {
        if self.broken.is_some() {
            return;
        }
        match self.post_receive(buffer) {
            Ok(()) => self.owed += 1,
            Err(errno) => self.fail(vendor::POST | errno),
        }
    }

    /// Sends what lies in the next send buffer behind the place of the header, with every credit
    /// that is owed. The caller made sure of a buffer and a credit.
    fn post_send(&mut self, kind: u8, len: u16) -> Result<(), u32> {
        let head = Head { len, credits: self.owed as u8, kind, seq: self.sent };
        self.send_buffer()[..HEAD].copy_from_slice(&head.bytes());
        let slot = self.sent % self.sends;
        let total = HEAD + usize::from(len);
        let sge = self.sge(MAIL_RECEIVES + slot, total);
        let signal = self.probing
            || kind == PROOF
            || slot % SIGNAL_EVERY == SIGNAL_EVERY - 1
            || self.free_sends() <= FEW;
        let flags = (total <= self.inline as usize, signal);
        // SAFETY: V30: the buffer is free; it is the NIC's from here on, until the frame is done.
        match unsafe { wire::send(self.qp, sge, self.id(false, slot as u8), flags) } {
            Ok(()) => {
                self.sent = self.sent.wrapping_add(1);
                if signal {
                    self.marked = self.sent;
                }
                self.credits -= 1;
                self.owed = 0;
                Ok(())
            }
            Err(errno) => {
                self.fail(vendor::POST | errno);
                Err(errno)
            }
        }
    }

    /// Says that the link is of no use any more; the first reason stays.
    pub(super) fn fail(&mut self, code: u32) {
        self.broken.get_or_insert(code);
    }

    /// The peer is told what it is owed, when that is much and no data carried it. The last credit
    /// may be spent on this and on nothing else, so two sides that only send cannot starve each
    /// other.
    pub(super) fn settle(&mut self) {
        let due = self.owed >= self.receives / 2 && self.greeted && self.broken.is_none();
        if due && self.credits > 0 && self.free_sends() > 0 {
            // A failure is kept in `broken`.
            let _ = self.post_send(CREDIT, 0);
        }
    }

    /// The oldest frame that is not known to be received; a completion is due for it, which a frame
    /// without content is sent for if no other tells. `None`: there is none, or none can be sent.
    pub(super) fn oldest(&mut self) -> Option<u32> {
        let flying = self.sent.wrapping_sub(self.done);
        if self.broken.is_some() || !self.known || flying == 0 {
            return None;
        }
        // Marked frames lie between `done` and `sent`, or are done.
        let due = self.marked.wrapping_sub(self.done);
        if due == 0 || due > flying {
            if self.credits <= 1 || self.free_sends() == 0 {
                return None;
            }
            self.probing = true;
            let sent = self.post_send(CREDIT, 0);
            self.probing = false;
            sent.ok()?;
        }
        Some(self.done)
    }

    /// A send completed, and with it all before it.
    pub(super) fn retire(&mut self, buffer: u8) {
        let flying = self.sent.wrapping_sub(self.done);
        let n = (u32::from(buffer).wrapping_sub(self.done) % self.sends) + 1;
        if n <= flying {
            self.done = self.done.wrapping_add(n);
            self.greeting_done = true;
        }
    }

    /// A receive completed with `bytes` bytes.
    pub(super) fn arrive(&mut self, buffer: u8, bytes: u32) {
        if u32::from(buffer) >= MAIL_RECEIVES || self.posted & 1 << buffer == 0 {
            return;
        }
        self.posted &= !(1 << buffer);
        if self.broken.is_some_and(vendor::is_protocol) {
            return;
        }
        match self.check(buffer, bytes) {
            Ok(head) => {
                self.next = self.next.wrapping_add(1);
                self.credits += u32::from(head.credits);
                if head.kind == DATA {
                    self.inbox.push(buffer, head.len);
                } else {
                    self.known = true;
                    self.recycle(buffer);
                    if !self.greeted && self.broken.is_none() {
                        // A failure is kept in `broken`.
                        let _ = self.greet();
                    }
                }
            }
            Err(code) => self.fail(code),
        }
    }

    /// Checks a frame against what the peer may send now.
    fn check(&self, buffer: u8, bytes: u32) -> Result<Head, u32> {
        let frame = self.receive_buffer(buffer).get(..bytes as usize).unwrap_or(&[]);
        let head = Head::of(frame).ok_or(vendor::FRAME)?;
        let body = &frame[HEAD..];
        if body.len() != usize::from(head.len) || head.seq != self.next {
            return Err(vendor::FRAME);
        }
        // It can give back no more than it was sent.
        if self.credits + u32::from(head.credits) > self.window {
            return Err(vendor::FRAME);
        }
        match head.kind {
            PROOF if !self.known && body.len() == MAIL_BUFFER - HEAD => {
                if body.starts_with(&self.expected) {
                    Ok(head)
                } else {
                    Err(vendor::COOKIE)
                }
            }
            DATA if self.known && !body.is_empty() => Ok(head),
            CREDIT if self.known && body.is_empty() => Ok(head),
            _ => Err(vendor::FRAME),
        }
    }

    fn closed(&self) -> Result<(), Closed> {
        self.broken.map_or(Ok(()), |vendor| Err(Closed { vendor }))
    }

    /// Sends as much of the parts as there are buffers and credits for. The last credit is kept for
    /// [`Mailbox::settle`].
    pub(super) fn send(&mut self, parts: &[&[u8]]) -> Result<usize, Closed> {
        self.closed()?;
        let mut rest = parts.iter().copied();
        let mut part: &[u8] = &[];
        let mut taken = 0;
        while self.greeted && self.credits > 1 && self.free_sends() > 0 {
            let body = &mut self.send_buffer()[HEAD..];
            let mut n = 0;
            while n < body.len() {
                if part.is_empty() {
                    let Some(next) = rest.next() else { break };
                    part = next;
                }
                let count = part.len().min(body.len() - n);
                body[n..n + count].copy_from_slice(&part[..count]);
                part = &part[count..];
                n += count;
            }
            if n == 0 {
                break;
            }
            if self.post_send(DATA, n as u16).is_err() {
                // What went before it may arrive; the next call tells.
                return if taken > 0 { Ok(taken) } else { self.closed().map(|()| 0) };
            }
            taken += n;
        }
        Ok(taken)
    }

    /// Takes what has arrived, in order. What arrived before a failure comes before its report.
    pub(super) fn receive(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let mut n = 0;
        while n < into.len() {
            let Some((buffer, len)) = self.inbox.front() else { break };
            let from = self.inbox.taken;
            let count = (len - from).min(into.len() - n);
            let at = HEAD + from;
            into[n..n + count].copy_from_slice(&self.receive_buffer(buffer)[at..at + count]);
            n += count;
            self.inbox.taken += count;
            if from + count == len {
                self.inbox.pop();
                self.recycle(buffer);
            }
        }
        self.settle();
        if n == 0 && self.inbox.count == 0 {
            self.closed()?;
        }
        Ok(n)
    }
}
