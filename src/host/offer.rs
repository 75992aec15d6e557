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

    #[test]
    fn round_trips_and_every_cut_is_an_error() {
        let offer = RailOffer {
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
        };
        let bytes = offer.encode();
        assert_eq!(RailOffer::decode(&bytes).unwrap(), offer);
        for n in 0..bytes.len() {
            // The rails come last and may be missing: an older build has none.
            let without = n == bytes.len() - 7;
            assert_eq!(RailOffer::decode(&bytes[..n]).is_ok(), without, "cut at {n}");
        }
    }
}
