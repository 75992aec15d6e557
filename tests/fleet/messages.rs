//! Messages as they arrive: each once, in order, and after the data.

use super::*;

/// What a receiver knows of the messages of one sender.
#[derive(Clone, Copy, Default)]
pub struct Heard {
    pub last: u64,
    pub conn: u32,
}

/// Sender and receiver with their incarnations.
pub type Stream = (usize, u32, usize, u32);

impl Fleet {
    /// A message that belongs to no transfer.
    pub fn send_alone(&mut self, p: usize, side: usize) {
        let sides = self.pairs[p].sides;
        let (from, to) = (sides[side], sides[1 - side]);
        let stream = (from, self.sites[from].life, to, self.sites[to].life);
        let sent = self.sent.get(&stream).map_or(0, |h| h.last) + 1;
        let mut text = vec![b'A'];
        for word in [from as u64, stream.1.into(), stream.3.into(), sent] {
            text.extend_from_slice(&word.to_le_bytes());
        }
        let conn = self.pairs[p].closes;
        text.extend_from_slice(&u64::from(conn).to_le_bytes());
        text.resize(41 + self.rng.below(700) as usize, sent as u8);
        let peer = self.world.peer(from, to).raw();
        if self.world.engines[from].notify(peer, &text).is_ok() {
            self.sent.insert(stream, Heard { last: sent, conn });
            self.counts.messages += 1;
        }
    }

    /// The applications take what has come.
    pub fn messages_tick(&mut self) -> Result<(), String> {
        for e in 0..self.sites.len() {
            // Some look rarely.
            let rarely = if self.calm { 1 } else { self.sites[e].looks_every };
            if !self.runs(e) || !self.now().is_multiple_of(rarely) {
                continue;
            }
            for (name, text) in self.world.messages(e) {
                if text.first() == Some(&b'T') {
                    self.note_came(e, &name, &text)?;
                } else {
                    self.alone_came(e, &name, &text)?;
                }
            }
        }
        Ok(())
    }

    fn note_came(&mut self, e: usize, name: &str, text: &[u8]) -> Result<(), String> {
        let id = word(text, 1);
        let Some(note) = self.notes.get_mut(&id) else {
            return Err(format!("message {id} was never sent"));
        };
        let (to, fate) = (note.to, note.fate);
        if core::mem::replace(&mut note.got, true) {
            return Err(format!("message {id} arrived twice"));
        }
        if to != e || fate == Fate::Never || note.to_life != self.sites[e].life {
            return Err(format!("message {id} to {to}, which {fate:?}, arrived at {e}"));
        }
        note.due = u64::MAX;
        self.counts.notes += 1;
        self.talked(name, e);
        if text[9..].iter().any(|&b| b != id as u8) {
            return Err(format!("message {id} has wrong bytes"));
        }
        let Some(at) = self.flights.iter().position(|f| f.has_note(id)) else { return Ok(()) };
        let from = self.flights[at].from;
        if name != format!("engine-{from}") {
            return Err(format!("message {id} of engine {from} comes from {name:?}"));
        }
        self.compare_at(at).map_err(|e| format!("message {id} came before its data: {e}"))
    }

    fn alone_came(&mut self, e: usize, name: &str, text: &[u8]) -> Result<(), String> {
        let [from, from_life, to_life, seq, conn] = core::array::from_fn(|i| word(text, 1 + 8 * i));
        let stream = (from as usize, from_life as u32, e, to_life as u32);
        let heard = self.heard.entry(stream).or_default();
        let gap = seq != heard.last + 1 && conn as u32 == heard.conn;
        if seq <= heard.last || gap || text[41..].iter().any(|&b| b != seq as u8) {
            let before = heard.last;
            return Err(format!("message {seq} of {name} came to {e} after {before}"));
        }
        *heard = Heard { last: seq, conn: conn as u32 };
        self.talked(name, e);
        // Transfers of a sender that died are gone; a message of it may have lain here.
        let passed = |f: &&Flight| {
            (f.from, self.sites[f.from].life, f.to, f.to_life) == stream
                && f.behind.is_some_and(|last| seq > last)
                && f.note.is_some_and(|id| self.notes.get(&id).is_some_and(|n| !n.got))
        };
        if let Some(at) = self.flights.iter().position(|f| passed(&f)) {
            let (last, text) = (self.flights[at].behind, self.describe(at));
            return Err(format!(
                "message {seq} of {name} came to {e} before that of a transfer, which was queued \
                 behind {last:?}: {text}"
            ));
        }
        if to_life as u32 != self.sites[e].life || name != format!("engine-{from}") {
            return Err(format!("message {seq} of {name} came to another life of {e}"));
        }
        Ok(())
    }

    /// A message has come.
    fn talked(&mut self, name: &str, to: usize) {
        let from = name.strip_prefix("engine-").and_then(|n| n.parse().ok());
        let Some(from) = from.filter(|&from: &usize| from < self.sites.len()) else { return };
        let (p, now) = (self.pair_of(from, to), self.now());
        let side = self.pairs[p].side_of(from);
        self.pairs[p].talked_at[side] = now;
    }

    /// Messages that are overdue, of transfers that are done.
    pub fn notes_tick(&mut self) -> Result<(), String> {
        let now = self.now();
        for (id, note) in &self.notes {
            if note.fate == Fate::Comes && !note.got && now > note.due && self.runs(note.to) {
                let to = note.to;
                return Err(format!("message {id} to {to} of a transfer that is done is lost"));
            }
        }
        // A late copy would have come by then.
        self.notes.retain(|_, n| n.fate == Fate::Open || !n.got || self.plan.transfers < 5_000);
        Ok(())
    }

    /// At the end: every message of a connection that still is has come.
    pub fn all_heard(&self) -> Result<(), String> {
        for (stream, sent) in &self.sent {
            let (from, from_life, to, to_life) = *stream;
            let now = (self.sites[from].life, self.sites[to].life);
            let pair = &self.pairs[self.pair_of(from, to)];
            if now != (from_life, to_life) || sent.conn != pair.closes {
                continue;
            }
            let last = self.heard.get(stream).map_or(0, |h| h.last);
            if last != sent.last {
                let text = format!("{from} sent {} messages to {to}, the last", sent.last);
                return Err(format!("{text} that came is {last}"));
            }
        }
        Ok(())
    }
}

fn word(text: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&text[at..at + 8]);
    u64::from_le_bytes(bytes)
}
