//! What each side tells the other in the handshake: how its memory is reached by the `local`
//! driver, and how much it may be sent.

use super::blob::HostOffer;
use super::error::{Error, Result};
use super::rail::{RailPart, MAX_RAILS};
use super::wire::{Reader, Short, Writer};
use crate::nic::local::Offer;
use crate::status::Status;

const HOST: u16 = 1;
const LOCAL: u16 = 2;
const WINDOW: u16 = 3;
const RAILS: u16 = 4;
const CONNECTION: u16 = 5;
const JOIN: u16 = 6;

/// What a handshake says that adds rails to a connection.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct JoinPart {
    /// Id of the dialler's first rail here; the others count on.
    pub(super) first_id: u32,
    /// Ids of this connection's rails that are up on this side.
    pub(super) alive: Vec<u32>,
}

/// One side's offer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct RailOffer {
    /// Where it runs.
    pub(super) host: HostOffer,
    /// How the `local` driver reaches its memory.
    pub(super) local: Offer,
    /// Message costs that it may be sent before its application takes any.
    pub(super) window: u64,
    /// Its rails; none: it has transport `local` only.
    pub(super) rails: Vec<RailPart>,
    /// Number of the connection; none: a build that joins nothing (1.0).
    pub(super) connection: Option<u64>,
    /// Present when rails join a connection that lives.
    pub(super) join: Option<JoinPart>,
}

impl RailOffer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.tlv(HOST, |w| {
            w.bytes(&self.host.encode());
        });
        let l = &self.local;
        w.tlv(LOCAL, |w| {
            w.u32(l.pid).u32(l.fd).u64(l.guard).bytes(&l.cookie);
            w.u32(l.peers).u32(l.regions).u32(l.row);
        });
        w.tlv(WINDOW, |w| {
            w.u64(self.window);
        });
        w.tlv(RAILS, |w| {
            w.u8(self.rails.len().min(MAX_RAILS) as u8);
            for rail in self.rails.iter().take(MAX_RAILS) {
                w.counted(|w| rail.put(w));
            }
        });
        if let Some(id) = self.connection {
            w.tlv(CONNECTION, |w| {
                w.u64(id);
            });
        }
        if let Some(join) = &self.join {
            w.tlv(JOIN, |w| {
                w.u32(join.first_id).u8(join.alive.len().min(MAX_RAILS) as u8);
                for id in join.alive.iter().take(MAX_RAILS) {
                    w.u32(*id);
                }
            });
        }
        w.finish()
    }

    /// Records of an unknown type, and bytes after the known fields, are skipped.
    pub(super) fn decode(bytes: &[u8]) -> Result<RailOffer> {
        let short = |e: Short| Error::new(Status::Refused, format!("the peer's offer: {e}"));
        let mut offer = RailOffer::default();
        let mut have = [false; 3];
        let mut r = Reader::new(bytes);
        while let Some(record) = r.tlv().map_err(short)? {
            let mut body = Reader::new(record.body);
            match record.kind {
                HOST => offer.host = HostOffer::decode(record.body)?,
                LOCAL => offer.local = local(&mut body).map_err(short)?,
                WINDOW => offer.window = body.u64().map_err(short)?,
                RAILS => {
                    offer.rails = rails(&mut body).map_err(short)?;
                    continue;
                }
                CONNECTION => {
                    offer.connection = Some(body.u64().map_err(short)?);
                    continue;
                }
                JOIN => {
                    offer.join = Some(join(&mut body).map_err(short)?);
                    continue;
                }
                _ => continue,
            }
            have[usize::from(record.kind) - 1] = true;
        }
        if have != [true; 3] {
            let text = "the peer's offer lacks its host, its memory or its window";
            return Err(Error::new(Status::Refused, text));
        }
        Ok(offer)
    }
}

fn rails(r: &mut Reader<'_>) -> core::result::Result<Vec<RailPart>, Short> {
    let mut rails = Vec::new();
    for _ in 0..usize::from(r.u8()?).min(MAX_RAILS) {
        let len = r.u32()? as usize;
        rails.push(RailPart::get(&mut Reader::new(r.bytes(len)?))?);
    }
    Ok(rails)
}

fn join(r: &mut Reader<'_>) -> core::result::Result<JoinPart, Short> {
    let mut join = JoinPart { first_id: r.u32()?, alive: Vec::new() };
    for _ in 0..usize::from(r.u8()?).min(MAX_RAILS) {
        join.alive.push(r.u32()?);
    }
    Ok(join)
}

fn local(r: &mut Reader<'_>) -> core::result::Result<Offer, Short> {
    Ok(Offer {
        pid: r.u32()?,
        fd: r.u32()?,
        guard: r.u64()?,
        cookie: r.array()?,
        peers: r.u32()?,
        regions: r.u32()?,
        row: r.u32()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> RailOffer {
        RailOffer {
            host: HostOffer { boot_id: [7; 16], pid_ns: 9, uid: 1, pid: 2 },
            local: Offer {
                pid: 2,
                fd: 5,
                guard: 0x1234_5000,
                cookie: [3; 16],
                peers: 4,
                regions: 8,
                row: 3,
            },
            window: 1 << 20,
            rails: Vec::new(),
            connection: Some(0x0102_0304_0506_0708),
            join: Some(JoinPart { first_id: 9, alive: vec![1, 4] }),
        }
    }

    #[test]
    fn round_trips_and_every_cut_is_an_error() {
        let full = offer();
        let bytes = full.encode();
        assert_eq!(RailOffer::decode(&bytes).unwrap(), full);
        // What newer builds added comes last and may be missing: rails, connection, join.
        let join = 6 + 4 + 1 + 2 * 4;
        let connection = 6 + 8;
        let ends = [join, join + connection, join + connection + 7].map(|n| bytes.len() - n);
        for n in 0..bytes.len() {
            assert_eq!(RailOffer::decode(&bytes[..n]).is_ok(), ends.contains(&n), "cut at {n}");
        }
    }

    #[test]
    fn an_offer_of_a_build_without_joins_has_no_connection() {
        let old = RailOffer { connection: None, join: None, ..offer() };
        let seen = RailOffer::decode(&old.encode()).unwrap();
        assert_eq!((seen.connection, seen.join), (None, None));
    }

    #[test]
    fn no_more_ids_are_taken_than_there_can_be_rails() {
        let ids: Vec<u32> = (0..MAX_RAILS as u32 + 5).collect();
        let many = RailOffer { join: Some(JoinPart { first_id: 0, alive: ids }), ..offer() };
        let seen = RailOffer::decode(&many.encode()).unwrap().join.unwrap();
        assert_eq!(seen.alive.len(), MAX_RAILS);
        let mut bytes = offer().encode();
        // The count of the join record, whose body it is the fifth byte of.
        let at = bytes.len() - 2 * 4 - 1;
        bytes[at] = 255;
        assert!(RailOffer::decode(&bytes).is_err());
    }
}
