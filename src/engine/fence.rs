//! Rails that break: what becomes of their claims and messages, and when it is safe to say "done".
//!
//! A rail is closed on this side first: its queue pair is gone, so it reads and writes no local
//! memory any more, and its claims go back to their transfers. READs need no more than that. A
//! WRITE's packets may still be on their way to the peer, where they would land in memory that was
//! handed on after "done". So a transfer keeps one hold for each broken rail that carried WRITEs of
//! it, a *debt*, until the peer has closed its end too and said so: the *fence*. Other rails may
//! repeat the WRITEs at once, since they put the same bytes there; but nothing is done, and no
//! message leaves, before the debts are paid.
//!
//! A WRITE that is posted while a rail to its peer is not fenced begins after the fence: an earlier
//! one to the same place may have ended in an error, and what it left under way must not land on
//! top.
//!
//! Both sides say `DOWN` of a rail after they closed it, whoever saw it break. A handshake that
//! brings up rails between the same two engines tells each side what the other holds, so it is a
//! fence for all the rest ([`Core::connect_rail`]).

use crate::engine::core::Core;
use crate::engine::peer::{PeerLink, NO_LANE};
use crate::engine::slot::{Body, RegionRef};
use crate::engine::state::Phase;
use crate::mutant::mutant;
use crate::nic::{Net, Port};
use crate::status::Status;
use crate::sync::Ordering;

impl<'m, P: Port, N: Net> Core<'m, P, N> {
    /// Control side only: lanes whose rail to a peer is of no use, one bit each: drop each with
    /// [`Core::drop_rail`]. Sees to fences that have come meanwhile.
    pub fn lost(&self, peer: u32) -> u32 {
        let book = &self.peers[peer as usize].book;
        let fenced = book.unfenced() & book.heard.load(Ordering::Acquire);
        for lane in (0..self.lanes.len() as u32).filter(|l| fenced & 1 << l != 0) {
            self.fence(lane, peer);
        }
        book.lost.load(Ordering::Acquire)
    }

    /// Id of the rail to a peer on a lane, from [`Core::connect_rail`] until it is dropped.
    pub fn rail_id(&self, lane: u32, peer: u32) -> Option<u32> {
        self.peers.get(peer as usize)?.book.id(lane)
    }

    /// Control side only: closes a rail, if it still is open, takes in what its message link has,
    /// and moves the messages to the next link. From now on the peer is told that the rail is down.
    /// Call after the message link's queue pair was stopped, so that it takes no more. The link,
    /// for the caller to close.
    pub fn drop_rail(&self, lane: u32, peer: u32) -> Option<N::Link> {
        self.close_for(lane, peer);
        let p = &self.peers[peer as usize];
        let (link, heard) = self.with_net_inner(|net| {
            // SAFETY: I2: `with_net_inner` holds the message token.
            let io = unsafe { &mut *p.io.get() };
            let at = io.links.iter().position(|l| l.lane == lane);
            if let Some(id) = at.map(|at| io.links[at].id).filter(|&id| io.on == Some(id)) {
                self.leave_link(peer, io, net, id);
            }
            let link = at.map(|at| io.links.swap_remove(at).link);
            if io.on.is_none() {
                io.on = io.links.iter().filter(|l| !l.broken).map(|l| l.id).min();
            }
            let closed = p.book.close(lane);
            if let (Some((id, heard)), Some(channel)) = (closed, &mut io.channel) {
                channel.down(id, heard);
            }
            (link, closed.is_some_and(|(_, heard)| heard))
        });
        self.kick(peer);
        if heard || mutant("fence_early") {
            self.fence(lane, peer);
        }
        link
    }

    /// Control side only: a message link for a rail that was connected to a living peer.
    pub fn add_link(&self, peer: u32, lane: u32, id: u32, link: N::Link) -> Result<(), N::Link> {
        let p = &self.peers[peer as usize];
        let added = self.with_net(|_| {
            // SAFETY: I2: `with_net` holds the message token.
            let io = unsafe { &mut *p.io.get() };
            io.links.push(PeerLink { lane, id, broken: false, link }).map_err(|l| l.link)?;
            io.on = io.on.or(Some(id));
            Ok(())
        });
        self.kick(peer);
        added
    }

    /// Control side only: the peer has closed its end of the rail that a lane had to it: nothing
    /// of that lands any more.
    pub fn fence(&self, lane: u32, peer: u32) {
        let debts = self.with_lane(lane, |inner| {
            self.lanes[lane as usize].take_debts(&mut inner.rails[peer as usize])
        });
        for slot in debts {
            self.leave(slot);
        }
        self.with_net(|_| {
            let book = &self.peers[peer as usize].book;
            // A new rail may be open in its place.
            if book.id(lane).is_none() {
                book.fenced(lane);
            }
        });
        // WRITEs that were posted meanwhile may begin.
        for lane in self.lanes {
            lane.token.publish();
        }
        self.worker.wake();
    }

    /// Lanes whose dropped rail to a peer is not fenced yet, one bit each.
    pub fn owes(&self, peer: u32) -> u32 {
        self.peers[peer as usize].book.unfenced()
    }

    /// Takes back the holds that ended transfers have for fences: they are not done, so nothing
    /// waits for these. Cheap where there are none. A lane that somebody works on is left for the
    /// next time.
    pub fn forgive(&self) {
        for lane in 0..self.lanes.len() as u32 {
            self.pay(lane, |slot| self.is_ending(slot));
        }
    }

    /// Lowers the holds of those debts on a lane that `which` picks. False: somebody works on it.
    fn pay(&self, lane: u32, which: impl Fn(u32) -> bool) -> bool {
        while self.lanes[lane as usize].owes() {
            let slot = self.try_lane(lane, |inner| {
                inner.rails.iter_mut().find_map(|rail| {
                    let at = rail.debts.iter().position(|&s| which(s))?;
                    self.lanes[lane as usize].owing.fetch_sub(1, Ordering::AcqRel);
                    Some(rail.debts.swap_remove(at))
                })
            });
            match slot {
                Some(Some(slot)) => self.leave(slot),
                Some(None) => return true,
                None => return false,
            }
        }
        true
    }

    /// Ends every transfer that `which` picks and that is not over: active ones, and those that
    /// only wait for a fence.
    pub(super) fn end_where(&self, status: Status, which: impl Fn(&Body) -> bool) {
        self.under_way(&[Phase::Active, Phase::Posting], |slot, body| {
            if which(body) {
                self.slots[slot as usize].end(status);
            }
            false
        });
        self.debtor(|slot, body| {
            if which(body) {
                self.slots[slot as usize].end(status);
            }
            false
        });
    }

    /// The first transfer in one of these phases, with an open cursor, that `f` says true to. It is
    /// held while `f` looks at it.
    pub(super) fn under_way(
        &self,
        phases: &[Phase],
        mut f: impl FnMut(u32, &Body) -> bool,
    ) -> Option<u32> {
        (0..).zip(self.slots.iter()).find_map(|(i, slot)| {
            if !phases.contains(&slot.state.phase()) {
                return None;
            }
            slot.enter();
            // SAFETY: I3: we hold the slot and saw the cursor open after that.
            let found = slot.cursor.look().is_some() && f(i, &unsafe { slot.body() });
            self.leave(i);
            found.then_some(i)
        })
    }

    /// The first transfer with a debt that `f` says true to.
    pub(super) fn debtor(&self, mut f: impl FnMut(u32, &Body) -> bool) -> Option<u32> {
        self.lanes.iter().filter(|lane| lane.owes()).find_map(|lane| {
            self.with_lane(lane.index, |inner| {
                let debts = inner.rails.iter().flat_map(|rail| rail.debts.iter());
                debts.copied().find(|&slot| {
                    // SAFETY: I3: the debt is a hold, taken while a claim held the transfer.
                    let body = unsafe { self.slots[slot as usize].body() };
                    f(slot, &body)
                })
            })
        })
    }

    /// Makes sure that nothing touches the memory of a transfer that was cancelled, whatever
    /// becomes of the rails: those that still have something of it in flight are closed, and what
    /// else they had in flight goes to others. After this it is at rest as soon as the calls that
    /// are looking at it return. False: it is not ending, or somebody works on a lane: ask again.
    pub fn evict(&self, raw: u64) -> Result<bool, Status> {
        let (index, state) = self.transfer(raw)?;
        Ok(state.phase == Phase::Ending && self.evict_where(|slot| slot == index))
    }

    /// The same for every transfer that is ending and uses a region. False: somebody works on a
    /// lane, so ask again.
    pub fn evict_users(&self, region: RegionRef) -> bool {
        self.evict_where(|slot| self.is_ending(slot) && self.held_uses(slot, region))
    }

    /// Whether something of a transfer that is ending and uses a region may be in flight still.
    /// Those that use others need not be at rest.
    pub(super) fn is_carried(&self, region: RegionRef) -> bool {
        let all = || 0..self.slots.len() as u32;
        if !all().any(|slot| self.is_ending(slot)) {
            return false;
        }
        // Whoever ends one closes its cursor a moment later, and until then rails may claim of it.
        // What they claimed before is in their ledgers when their tokens are free.
        let open = |slot: u32| self.slots[slot as usize].cursor.look().is_some();
        if !mutant("quiesce_open") && all().any(|slot| self.is_ending(slot) && open(slot)) {
            return true;
        }
        self.lanes.iter().any(|lane| {
            let users = self.try_lane(lane.index, |inner| {
                let mut slots = inner.rails.iter().flat_map(|rail| rail.ledger.slots());
                slots.any(|slot| self.held_uses(slot, region))
            });
            // A lane that somebody works on may be about to record a claim.
            users.unwrap_or(!mutant("quiesce_blind"))
        })
    }

    fn is_ending(&self, slot: u32) -> bool {
        self.slots[slot as usize].state.load().phase == Phase::Ending
    }

    /// Whether a transfer uses a region. The caller found a claim or a debt of it under the lane's
    /// token.
    fn held_uses(&self, slot: u32, region: RegionRef) -> bool {
        // SAFETY: I3: a claim or a debt that is not lowered is a hold.
        unsafe { self.slots[slot as usize].body() }.uses(region)
    }

    /// Lanes with a rail to a peer that is up, or broken and not dropped yet.
    pub fn held_rails(&self, peer: u32) -> u32 {
        self.peers[peer as usize].book.held()
    }

    fn evict_where(&self, which: impl Fn(u32) -> bool) -> bool {
        let mut all = true;
        for lane in self.lanes {
            let closed = self.try_lane(lane.index, |inner| {
                // What is done needs no force.
                self.reap(lane, inner);
                for peer in 0..inner.rails.len() as u32 {
                    if inner.rails[peer as usize].ledger.slots().any(&which) {
                        self.rail_failed(lane, inner, peer);
                    }
                }
            });
            all &= closed.is_some() && self.pay(lane.index, &which);
        }
        all
    }

    /// Closes the data rail of a lane, if it is open.
    fn close_for(&self, index: u32, peer: u32) {
        if index == NO_LANE {
            return;
        }
        let lane = &self.lanes[index as usize];
        self.with_lane(index, |inner| {
            if inner.rails[peer as usize].generation != 0 {
                self.reap(lane, inner);
            }
            if inner.rails[peer as usize].generation != 0 {
                self.rail_failed(lane, inner, peer);
            }
        });
    }
}
