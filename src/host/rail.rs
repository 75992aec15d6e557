//! A rail's end as the two sides describe it to each other, and which ends go together.

use core::fmt;
use core::net::Ipv4Addr;

use super::wire::{Reader, Short, Writer};

/// Most rails of one side: a bit each in READY.
pub(super) const MAX_RAILS: usize = crate::limits::MAX_RAILS as usize;
/// No partner.
const NONE: u8 = u8::MAX;

/// One side's end of a rail: a NIC port and what it can do. Travels in blobs, as a hint, and in
/// handshakes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RailEnd {
    /// The port's address, which its GID is made of.
    pub ipv4: Ipv4Addr,
    /// Bits of it that name the subnet.
    pub prefix: u8,
    /// The port's GID.
    pub gid: [u8; 16],
    /// Path MTU that the port takes, in bytes.
    pub mtu: u32,
    /// Longest message of the port, in bytes.
    pub max_msg: u32,
    /// READs that it may have outstanding as initiator.
    pub rd_initiator: u8,
    /// READs that it serves at a time as responder.
    pub rd_responder: u8,
    /// NUMA node, -1 if unknown.
    pub numa: i16,
    /// Speed in Mbit/s, 0 if unknown.
    pub speed_mbps: u32,
}

/// The queue pairs that one side made for a rail.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct RailQps {
    /// Number and first packet number of the data queue pair.
    pub(super) data: (u32, u32),
    /// The same of the message queue pair.
    pub(super) mail: (u32, u32),
    /// What this side sends over the message queue pair to prove the rail.
    pub(super) cookie: [u8; 16],
    /// Receives of the message queue pair: frames that the other side may send ahead.
    pub(super) window: u8,
}

/// A rail's end with its queue pairs, and which of the other side's ends it goes with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RailPart {
    /// Which of its side's NICs: the row of its keys in region blobs.
    pub(super) rail: u8,
    pub(super) end: RailEnd,
    pub(super) qps: RailQps,
    /// Place in the other side's list; `None`: without a partner, or not decided yet.
    pub(super) partner: Option<u8>,
}

impl RailEnd {
    pub(super) fn put(&self, w: &mut Writer) {
        w.bytes(&self.ipv4.octets()).u8(self.prefix).bytes(&self.gid);
        w.u32(self.mtu).u32(self.max_msg).u8(self.rd_initiator).u8(self.rd_responder);
        w.u16(self.numa as u16).u32(self.speed_mbps);
    }

    pub(super) fn get(r: &mut Reader<'_>) -> Result<RailEnd, Short> {
        let ip: [u8; 4] = r.array()?;
        Ok(RailEnd {
            ipv4: Ipv4Addr::from(ip),
            prefix: r.u8()?.min(32),
            gid: r.array()?,
            mtu: r.u32()?,
            max_msg: r.u32()?,
            rd_initiator: r.u8()?,
            rd_responder: r.u8()?,
            numa: r.u16()? as i16,
            speed_mbps: r.u32()?,
        })
    }

    fn shares_subnet(&self, other: &RailEnd) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
        self.prefix == other.prefix && u32::from(self.ipv4) & mask == u32::from(other.ipv4) & mask
    }
}

impl fmt::Display for RailEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ipv4, self.prefix)
    }
}

impl RailPart {
    pub(super) fn put(&self, w: &mut Writer) {
        w.u8(self.rail);
        self.end.put(w);
        let q = &self.qps;
        w.u32(q.data.0).u32(q.data.1).u32(q.mail.0).u32(q.mail.1).bytes(&q.cookie);
        w.u8(self.partner.unwrap_or(NONE)).u8(q.window);
    }

    pub(super) fn get(r: &mut Reader<'_>) -> Result<RailPart, Short> {
        let mut part = RailPart {
            rail: r.u8()?,
            end: RailEnd::get(r)?,
            qps: RailQps {
                data: (r.u32()?, r.u32()?),
                mail: (r.u32()?, r.u32()?),
                cookie: r.array()?,
                window: 0,
            },
            partner: Some(r.u8()?).filter(|p| usize::from(*p) < MAX_RAILS),
        };
        part.qps.window = r.u8()?;
        Ok(part)
    }
}

/// Which of `mine` goes with which of `theirs`, as places in the two lists: rails of one subnet
/// first, the rest in order. As many pairs as the shorter list has; the proof decides which of them
/// work, since rails of different subnets may well reach each other through a router.
pub(super) fn pair(mine: &[RailEnd], theirs: &[RailEnd]) -> Vec<(usize, usize)> {
    let mut free = vec![true; theirs.len()];
    let mut found: Vec<Option<usize>> = vec![None; mine.len()];
    for (own, to) in mine.iter().zip(&mut found) {
        let near = theirs.iter().zip(&free).position(|(t, f)| *f && own.shares_subnet(t));
        *to = near.inspect(|&i| free[i] = false);
    }
    for to in found.iter_mut().filter(|f| f.is_none()) {
        *to = free.iter().position(|f| *f).inspect(|&i| free[i] = false);
    }
    found.iter().enumerate().filter_map(|(i, to)| Some((i, (*to)?))).collect()
}

/// The ends of both sides in one line, for an error.
pub(super) fn both(mine: &[RailEnd], theirs: &[RailEnd]) -> String {
    let list = |ends: &[RailEnd]| match ends {
        [] => String::from("none"),
        _ => ends.iter().map(RailEnd::to_string).collect::<Vec<_>>().join(", "),
    };
    format!("rails here: {}; rails of the peer: {}", list(mine), list(theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(ip: [u8; 4], prefix: u8) -> RailEnd {
        RailEnd {
            ipv4: ip.into(),
            prefix,
            gid: [7; 16],
            mtu: 4096,
            max_msg: 1 << 30,
            rd_initiator: 16,
            rd_responder: 8,
            numa: -1,
            speed_mbps: 100_000,
        }
    }

    fn rails(nets: &[u8]) -> Vec<RailEnd> {
        nets.iter().map(|n| end([10, 1, *n, 1], 24)).collect()
    }

    #[test]
    fn rails_of_one_subnet_go_together_whatever_their_order() {
        let pairs = pair(&rails(&[0, 1, 2, 3]), &rails(&[3, 1, 0, 2]));
        assert_eq!(pairs, [(0, 2), (1, 1), (2, 3), (3, 0)]);
    }

    #[test]
    fn the_shorter_side_decides_how_many() {
        assert_eq!(pair(&rails(&[0, 1, 2, 3]), &rails(&[2, 3])), [(2, 0), (3, 1)]);
        assert_eq!(pair(&rails(&[2]), &rails(&[0, 1, 2, 3])), [(0, 2)]);
        assert_eq!(pair(&rails(&[0, 1]), &[]), []);
        assert_eq!(pair(&[], &rails(&[0])), []);
    }

    #[test]
    fn without_a_common_subnet_the_order_decides() {
        assert_eq!(pair(&rails(&[0, 1]), &rails(&[8, 9])), [(0, 0), (1, 1)]);
        // The second of ours is near the first of theirs; what is left goes together.
        assert_eq!(pair(&rails(&[0, 8]), &rails(&[8, 9])), [(0, 1), (1, 0)]);
    }

    #[test]
    fn a_subnet_is_its_prefix_too() {
        let a = end([10, 20, 0, 1], 28);
        assert!(a.shares_subnet(&end([10, 20, 0, 14], 28)));
        assert!(!a.shares_subnet(&end([10, 20, 0, 17], 28)));
        assert!(!a.shares_subnet(&end([10, 20, 0, 2], 24)));
        assert!(end([1, 2, 3, 4], 0).shares_subnet(&end([9, 9, 9, 9], 0)));
    }

    #[test]
    fn parts_round_trip_and_every_cut_is_an_error() {
        let part = RailPart {
            rail: 2,
            end: end([10, 1, 2, 3], 24),
            qps: RailQps { data: (1, 2), mail: (3, 4), cookie: [5; 16], window: 8 },
            partner: Some(3),
        };
        let mut w = Writer::new();
        part.put(&mut w);
        let bytes = w.finish();
        assert_eq!(RailPart::get(&mut Reader::new(&bytes)).unwrap(), part);
        for n in 0..bytes.len() {
            assert!(RailPart::get(&mut Reader::new(&bytes[..n])).is_err(), "cut at {n}");
        }
    }
}
