//! Metadata blobs: what a peer needs to reach an agent, and what it needs to reach one region.
//!
//! Layout: `magic[4] major:u16 minor:u16 total_len:u32`, then records (`wire`) up to `total_len`.
//! `total_len` counts the header. Bytes after it are skipped, as are records of an unknown type and
//! bytes after the known fields of a record, so a newer minor version adds records (rails, keys,
//! seams) or fields and an older build still reads the rest. Another major version is refused. A
//! blob is outside input: it is checked here, and nowhere trusted.

use super::error::{hex, shown, Error, Result};
use super::rail::{RailEnd, MAX_RAILS};
use super::wire::{Reader, Short, Writer};
use crate::status::Status;
use crate::table::NO_SEAMS;
use core::fmt;
use core::net::{Ipv4Addr, SocketAddrV4};

/// Major version of both blobs: another one is refused.
pub const MAJOR: u16 = 1;
/// Minor version of both blobs: any is read.
pub const MINOR: u16 = 0;
/// Longest agent name in bytes.
pub const MAX_NAME: usize = 255;
/// Most listener addresses of one agent.
pub const MAX_ADDRS: usize = 16;

const HEADER: usize = 12;
const CONN: Form = Form { magic: *b"KVRC", what: "connection blob" };
const REGION: Form = Form { magic: *b"KVRR", what: "region blob" };

// Record types. Never reused; the next free ones are for rails, keys and seams.
const NAME: u16 = 1;
const INCARNATION: u16 = 2;
const SECRET: u16 = 3;
const ADDRS: u16 = 4;
const HOST: u16 = 5;
const MESSAGE: u16 = 6;
const REGION_ID: u16 = 7;
const RAILS: u16 = 8;
const KEYS: u16 = 9;
/// Most pieces of a region: of 2 GiB each, these are the address space of a process.
const MAX_PIECES: usize = 1 << 16;

/// Where a process runs, for drivers that need both sides on one host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostOffer {
    /// The kernel's boot id: equal on one running host only.
    pub boot_id: [u8; 16],
    /// Inode of the pid namespace, which gives `pid` its meaning.
    pub pid_ns: u64,
    /// Real user id.
    pub uid: u32,
    /// Process id within `pid_ns`.
    pub pid: u32,
}

/// What a peer needs to dial an agent. It carries the secret: who holds it may connect.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnBlob {
    /// The agent's name, 1 to [`MAX_NAME`] bytes of any value.
    pub name: Vec<u8>,
    /// This life of the agent: a restart under the same name has another.
    pub incarnation: [u8; 16],
    /// Proves to the agent that the dialler holds this blob. Never sent over a connection.
    pub secret: [u8; 32],
    /// Where it listens, best first, 1 to [`MAX_ADDRS`].
    pub addrs: Vec<SocketAddrV4>,
    /// Where it runs.
    pub offer: HostOffer,
    /// Longest notification that it takes.
    pub max_message: u32,
    /// Its rails when the blob was made; none: it has transport `local` only. The handshake tells
    /// what holds at the connect.
    pub rails: Vec<RailEnd>,
}

impl fmt::Debug for ConnBlob {
    // By hand, to keep the secret out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnBlob")
            .field("name", &shown(&self.name, MAX_NAME))
            .field("incarnation", &hex(&self.incarnation))
            .field("addrs", &self.addrs)
            .field("offer", &self.offer)
            .field("max_message", &self.max_message)
            .field("rails", &self.rails)
            .finish_non_exhaustive()
    }
}

/// What a peer needs to name a region of an agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionBlob {
    /// The life of the agent that owns the region.
    pub incarnation: [u8; 16],
    /// Region slot at the owner.
    pub slot: u32,
    /// Its generation there.
    pub generation: u32,
    /// First byte, in the owner's addresses.
    pub base: u64,
    /// Bytes, at least 1. `base + len` does not overflow.
    pub len: u64,
    /// Kind of memory. Not checked here: a newer build may know more kinds.
    pub mem: u32,
    /// The rkeys that the owner's rails have for it.
    pub keys: RegionKeys,
}

/// The rkeys of a region, on every rail of its owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionKeys {
    /// Base-2 logarithm of the bytes of a piece: each piece is a memory region of its own.
    pub shift: u8,
    /// Keys, rail by rail in the order of the owner's offer, on each rail piece by piece.
    pub keys: Vec<u32>,
    /// Rails.
    pub rails: u8,
}

impl Default for RegionKeys {
    fn default() -> RegionKeys {
        RegionKeys { shift: NO_SEAMS, keys: Vec::new(), rails: 0 }
    }
}

impl RegionKeys {
    /// Pieces of a region of `len` bytes.
    fn pieces(&self, len: u64) -> u64 {
        (len.saturating_sub(1) >> self.shift) + 1
    }

    fn put(&self, w: &mut Writer) {
        w.u8(self.shift).u8(self.rails).u16(0);
        for key in &self.keys {
            w.u32(*key);
        }
    }

    fn get(r: &mut Reader<'_>, len: u64) -> Fields<RegionKeys> {
        let (shift, rails, _) = (r.u8()?.clamp(12, NO_SEAMS), r.u8()?, r.u16()?);
        let mut found = RegionKeys { shift, rails, keys: Vec::new() };
        let pieces = usize::try_from(found.pieces(len)).unwrap_or(usize::MAX).min(MAX_PIECES);
        // As many as there are bytes for, whatever the head says.
        for _ in 0..pieces * usize::from(rails) {
            found.keys.push(r.u32()?);
        }
        Ok(found)
    }
}

impl ConnBlob {
    /// The bytes that a peer decodes.
    pub fn encode(&self) -> Result<Vec<u8>> {
        check_name(&self.name)?;
        check_addrs(self.addrs.len())?;
        Ok(CONN.encode(|w| {
            w.tlv(NAME, |w| {
                w.bytes(&self.name);
            });
            w.tlv(INCARNATION, |w| {
                w.bytes(&self.incarnation);
            });
            w.tlv(SECRET, |w| {
                w.bytes(&self.secret);
            });
            w.tlv(ADDRS, |w| {
                for addr in &self.addrs {
                    w.bytes(&addr.ip().octets()).u16(addr.port());
                }
            });
            w.tlv(HOST, |w| put_offer(w, &self.offer));
            w.tlv(MESSAGE, |w| {
                w.u32(self.max_message);
            });
            if !self.rails.is_empty() {
                w.tlv(RAILS, |w| {
                    w.u8(self.rails.len() as u8);
                    for rail in &self.rails {
                        w.counted(|w| rail.put(w));
                    }
                });
            }
        }))
    }

    /// Reads and checks a blob.
    pub fn decode(bytes: &[u8]) -> Result<ConnBlob> {
        let [name, incarnation, secret, addrs, host, message] = CONN.records(
            bytes,
            [NAME, INCARNATION, SECRET, ADDRS, HOST, MESSAGE],
            ["name", "incarnation", "secret", "addresses", "host", "longest message"],
        )?;
        check_name(name.body)?;
        Ok(ConnBlob {
            name: name.body.to_vec(),
            incarnation: incarnation.read(|r| r.array())?,
            secret: secret.read(|r| r.array())?,
            addrs: get_addrs(addrs.body)?,
            offer: host.read(get_offer)?,
            max_message: message.read(|r| r.u32())?,
            rails: CONN
                .optional(bytes, RAILS, "rails")?
                .map_or(Ok(Vec::new()), |r| r.read(get_rails))?,
        })
    }
}

impl HostOffer {
    /// The offer as bytes of its own, for the handshake.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        put_offer(&mut w, self);
        w.finish()
    }

    /// Reads [`HostOffer::encode`]; bytes after the known fields are skipped.
    pub fn decode(bytes: &[u8]) -> Result<HostOffer> {
        get_offer(&mut Reader::new(bytes))
            .map_err(|e| Error::new(Status::BlobTruncated, format!("host offer: {e}")))
    }
}

impl RegionBlob {
    /// The bytes that a peer decodes.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        Ok(REGION.encode(|w| {
            w.tlv(INCARNATION, |w| {
                w.bytes(&self.incarnation);
            });
            w.tlv(REGION_ID, |w| {
                w.u32(self.slot).u32(self.generation).u64(self.base).u64(self.len).u32(self.mem);
            });
            if self.keys.rails > 0 {
                w.tlv(KEYS, |w| self.keys.put(w));
            }
        }))
    }

    /// Reads and checks a blob.
    pub fn decode(bytes: &[u8]) -> Result<RegionBlob> {
        let [incarnation, id] =
            REGION.records(bytes, [INCARNATION, REGION_ID], ["incarnation", "region"])?;
        let incarnation = incarnation.read(|r| r.array())?;
        let keys = REGION.optional(bytes, KEYS, "keys")?;
        let mut blob = id.read(|r| {
            Ok(RegionBlob {
                incarnation,
                slot: r.u32()?,
                generation: r.u32()?,
                base: r.u64()?,
                len: r.u64()?,
                mem: r.u32()?,
                keys: RegionKeys::default(),
            })
        })?;
        blob.check()?;
        if let Some(keys) = keys {
            blob.keys = keys.read(|r| RegionKeys::get(r, blob.len))?;
        }
        Ok(blob)
    }

    fn check(&self) -> Result<()> {
        if self.len == 0 || self.base.checked_add(self.len).is_none() {
            return Err(invalid(format!(
                "region blob: {} bytes at {:#x}; allowed: at least 1 byte, inside 64 bits",
                self.len, self.base
            )));
        }
        Ok(())
    }
}

/// One of the two blobs.
struct Form {
    magic: [u8; 4],
    what: &'static str,
}

/// A known record of a blob.
struct Record<'a> {
    form: &'a Form,
    name: &'static str,
    body: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads fields from the front; what follows them is a newer version's.
    fn read<T>(&self, f: impl FnOnce(&mut Reader<'a>) -> Fields<T>) -> Result<T> {
        f(&mut Reader::new(self.body))
            .map_err(|e| truncated(format!("{}: record `{}`: {e}", self.form.what, self.name)))
    }
}

type Fields<T> = core::result::Result<T, Short>;

impl Form {
    fn encode(&self, fill: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut w = Writer::new();
        w.bytes(&self.magic).u16(MAJOR).u16(MINOR).u32(0);
        fill(&mut w);
        w.patch(8, w.len());
        w.finish()
    }

    /// Checks the header and finds the records of `kinds`, each of which must be there once.
    fn records<'a, const N: usize>(
        &'a self,
        bytes: &'a [u8],
        kinds: [u16; N],
        names: [&'static str; N],
    ) -> Result<[Record<'a>; N]> {
        let mut reader = Reader::new(self.body(bytes)?);
        let mut found: [Option<&[u8]>; N] = [None; N];
        let next = |r: &mut Reader<'a>| {
            r.tlv().map_err(|e| truncated(format!("{}: a record: {e}", self.what)))
        };
        while let Some(tlv) = next(&mut reader)? {
            let Some(i) = kinds.iter().position(|k| *k == tlv.kind) else { continue };
            if found[i].replace(tlv.body).is_some() {
                return Err(invalid(format!(
                    "{}: record `{}` is there twice; allowed: once",
                    self.what, names[i]
                )));
            }
        }
        if let Some(i) = found.iter().position(Option::is_none) {
            return Err(truncated(format!(
                "{}: record `{}` (type {}) is missing",
                self.what, names[i], kinds[i]
            )));
        }
        Ok(core::array::from_fn(|i| Record {
            form: self,
            name: names[i],
            body: found[i].unwrap_or_default(),
        }))
    }

    /// A record that need not be there. The blob's header was checked before.
    fn optional<'a>(
        &'a self,
        bytes: &'a [u8],
        kind: u16,
        name: &'static str,
    ) -> Result<Option<Record<'a>>> {
        let mut reader = Reader::new(self.body(bytes)?);
        let next = |r: &mut Reader<'a>| {
            r.tlv().map_err(|e| truncated(format!("{}: a record: {e}", self.what)))
        };
        while let Some(tlv) = next(&mut reader)? {
            if tlv.kind == kind {
                return Ok(Some(Record { form: self, name, body: tlv.body }));
            }
        }
        Ok(None)
    }

    /// The bytes after the header, up to `total_len`.
    fn body<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8]> {
        let first = bytes.get(..4).unwrap_or(bytes);
        if !self.magic.starts_with(first) {
            return Err(self.foreign(bytes));
        }
        let short = |_| {
            truncated(format!(
                "{}: {} bytes, its header alone has {HEADER}; pass the whole blob",
                self.what,
                bytes.len()
            ))
        };
        let mut r = Reader::new(bytes);
        let (_, major, minor) =
            (r.bytes(4).map_err(short)?, r.u16().map_err(short)?, r.u16().map_err(short)?);
        // Before the length: the header of another major version may go on differently.
        if major != MAJOR {
            return Err(Error::new(
                Status::BlobVersion,
                format!(
                    "{} of version {major}.{minor}, this build reads {MAJOR}.x (writes \
                     {MAJOR}.{MINOR}); run kvrail builds of one major version on both sides",
                    self.what
                ),
            ));
        }
        let total = usize::try_from(r.u32().map_err(short)?).unwrap_or(usize::MAX);
        match bytes.get(HEADER..total) {
            Some(body) => Ok(body),
            None if total < HEADER => Err(truncated(format!(
                "{}: it says {total} bytes in all, its header alone has {HEADER}",
                self.what
            ))),
            None => Err(truncated(format!(
                "{}: {} bytes, it says {total}; pass the whole blob",
                self.what,
                bytes.len()
            ))),
        }
    }

    fn foreign(&self, bytes: &[u8]) -> Error {
        let first = bytes.get(..8).unwrap_or(bytes);
        let other = if first.starts_with(&CONN.magic) {
            "this is a connection blob; "
        } else if first.starts_with(&REGION.magic) {
            "this is a region blob; "
        } else {
            ""
        };
        Error::new(
            Status::BlobForeign,
            format!(
                "{other}a {} starts with {} (\"{}\"), seen {} (\"{}\") of {} bytes",
                self.what,
                hex(&self.magic),
                shown(&self.magic, 4),
                hex(first),
                shown(first, 8),
                bytes.len()
            ),
        )
    }
}

fn put_offer(w: &mut Writer, offer: &HostOffer) {
    w.bytes(&offer.boot_id).u64(offer.pid_ns).u32(offer.uid).u32(offer.pid);
}

fn get_offer(r: &mut Reader<'_>) -> Fields<HostOffer> {
    Ok(HostOffer { boot_id: r.array()?, pid_ns: r.u64()?, uid: r.u32()?, pid: r.u32()? })
}

fn get_rails(r: &mut Reader<'_>) -> Fields<Vec<RailEnd>> {
    // Rails beyond what this build can use, and fields that it does not know, are skipped.
    let count = usize::from(r.u8()?);
    let mut rails = Vec::new();
    for _ in 0..count {
        let len = r.u32()? as usize;
        let mut one = Reader::new(r.bytes(len)?);
        if rails.len() < MAX_RAILS {
            rails.push(RailEnd::get(&mut one)?);
        }
    }
    Ok(rails)
}

fn get_addrs(body: &[u8]) -> Result<Vec<SocketAddrV4>> {
    if !body.len().is_multiple_of(6) {
        return Err(truncated(format!(
            "connection blob: record `addresses`: {} bytes, an address has 6",
            body.len()
        )));
    }
    check_addrs(body.len() / 6)?;
    let addr = |a: &[u8]| match *a {
        [a, b, c, d, lo, hi] => {
            Some(SocketAddrV4::new(Ipv4Addr::new(a, b, c, d), u16::from_le_bytes([lo, hi])))
        }
        _ => None,
    };
    Ok(body.chunks_exact(6).filter_map(addr).collect())
}

fn check_name(name: &[u8]) -> Result<()> {
    if (1..=MAX_NAME).contains(&name.len()) {
        return Ok(());
    }
    Err(invalid(format!("agent name of {} bytes; allowed: 1 to {MAX_NAME}", name.len())))
}

fn check_addrs(n: usize) -> Result<()> {
    if (1..=MAX_ADDRS).contains(&n) {
        return Ok(());
    }
    Err(invalid(format!("{n} listener addresses; allowed: 1 to {MAX_ADDRS}")))
}

fn truncated(text: String) -> Error {
    Error::new(Status::BlobTruncated, text)
}

fn invalid(text: String) -> Error {
    Error::new(Status::Invalid, text)
}
