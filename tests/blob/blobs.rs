//! The two blobs.

use crate::{conn, region};
use core::net::{Ipv4Addr, SocketAddrV4};
use kvrail::host::blob::{
    ConnBlob, HostOffer, RegionBlob, RegionKeys, MAJOR, MAX_ADDRS, MAX_NAME, MINOR,
};
use kvrail::host::error::Error;
use kvrail::host::rail::RailEnd;
use kvrail::status::Status;
use kvrail::table::NO_SEAMS;
use proptest::prelude::*;

type Spoil = fn(&mut ConnBlob);
type Read = fn(&[u8]) -> Result<(), Error>;

/// Both kinds: good bytes and their decoder.
fn both() -> [(Vec<u8>, Read); 2] {
    [
        (conn().encode().unwrap(), |b| ConnBlob::decode(b).map(drop)),
        (region().encode().unwrap(), |b| RegionBlob::decode(b).map(drop)),
    ]
}

/// Appends a record and mends `total_len`.
fn with_record(mut bytes: Vec<u8>, kind: u16, body: &[u8]) -> Vec<u8> {
    bytes.extend(kind.to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    let total = bytes.len() as u32;
    bytes[8..12].copy_from_slice(&total.to_le_bytes());
    bytes
}

/// Offset of the record of type `kind`, and the length of its body.
fn record(bytes: &[u8], kind: u16) -> (usize, usize) {
    let mut at = 12;
    loop {
        let len = u32::from_le_bytes(bytes[at + 2..at + 6].try_into().unwrap()) as usize;
        if bytes[at..at + 2] == kind.to_le_bytes() {
            return (at, len);
        }
        at += 6 + len;
    }
}

#[test]
fn round_trip_at_a_known_size() {
    let bytes = conn().encode().unwrap();
    assert_eq!(ConnBlob::decode(&bytes).unwrap(), conn());
    assert!(bytes.len() <= 400, "{} bytes", bytes.len());
    let bytes = region().encode().unwrap();
    assert_eq!(RegionBlob::decode(&bytes).unwrap(), region());
    assert!(bytes.len() <= 100, "{} bytes", bytes.len());
    let offer = conn().offer;
    assert_eq!(HostOffer::decode(&offer.encode()).unwrap(), offer);
}

/// Wire format: a change here breaks every blob that NIXL keeps.
#[test]
fn the_layout_is_fixed() {
    let bytes = region().encode().unwrap();
    assert_eq!(&bytes[..12], b"KVRR\x01\0\0\0\x44\0\0\0");
    assert_eq!(bytes[12..18], [2, 0, 16, 0, 0, 0], "incarnation");
    assert_eq!(bytes[34..40], [7, 0, 28, 0, 0, 0], "region");
    assert_eq!(bytes[40..48], [5, 0, 0, 0, 6, 0, 0, 0]);
    let bytes = conn().encode().unwrap();
    assert_eq!(&bytes[..4], b"KVRC");
    for (kind, len) in [(1, 36), (2, 16), (3, 32), (4, 6), (5, 32), (6, 4)] {
        assert_eq!(record(&bytes, kind).1, len);
    }
    let (at, _) = record(&bytes, 4);
    assert_eq!(bytes[at + 6..at + 12], [127, 0, 0, 1, 0x40, 0x9c]);
}

#[test]
fn every_truncation_says_both_numbers() {
    for (bytes, read) in both() {
        for len in 0..bytes.len() {
            let e = read(&bytes[..len]).unwrap_err();
            assert_eq!(e.status, Status::BlobTruncated, "{len}: {e}");
            let total = if len < 12 { 12 } else { bytes.len() };
            assert!(
                e.message.contains(&format!("{len} bytes"))
                    && e.message.contains(&total.to_string()),
                "{len}: {e}"
            );
        }
    }
}

#[test]
fn bytes_after_the_end_are_skipped() {
    for (mut bytes, read) in both() {
        bytes.extend(b"anything");
        read(&bytes).unwrap();
    }
}

#[test]
fn foreign_bytes_are_shown() {
    let e = ConnBlob::decode(b"HTTP/1.1 200 OK").unwrap_err();
    assert_eq!(e.status, Status::BlobForeign);
    assert!(e.message.contains("485454502f312e31") && e.message.contains("HTTP/1.1"), "{e}");
    // Already wrong, however short.
    assert_eq!(RegionBlob::decode(b"X").unwrap_err().status, Status::BlobForeign);
    // One for the other.
    let e = ConnBlob::decode(&region().encode().unwrap()).unwrap_err();
    assert_eq!(e.status, Status::BlobForeign);
    assert!(e.message.contains("this is a region blob"), "{e}");
    let e = RegionBlob::decode(&conn().encode().unwrap()).unwrap_err();
    assert!(e.message.contains("this is a connection blob"), "{e}");
    assert!(!e.message.contains("0202"), "no secret in an error");
}

#[test]
fn a_newer_minor_version_is_read_and_another_major_refused_by_name_of_both() {
    for (bytes, read) in both() {
        // New fields at the end of a record, new records before and after, a new minor number.
        let mut newer = with_record(bytes.clone(), 900, b"rails");
        newer = with_record(newer, 65_535, b"");
        newer[6..8].copy_from_slice(&(MINOR + 1).to_le_bytes());
        read(&newer).unwrap();

        for major in [MAJOR + 1, 0, u16::MAX] {
            let mut other = bytes.clone();
            other[4..6].copy_from_slice(&major.to_le_bytes());
            // Even when its header goes on differently.
            other.truncate(8);
            let e = read(&other).unwrap_err();
            assert_eq!(e.status, Status::BlobVersion);
            assert!(
                e.message.contains(&format!("{major}.{MINOR}"))
                    && e.message.contains(&format!("{MAJOR}.{MINOR}")),
                "{e}"
            );
        }
    }
}

#[test]
fn a_newer_field_at_the_end_of_a_record_is_skipped() {
    for (bytes, read) in both() {
        for kind in [2, 3, 5, 6, 7] {
            if bytes[3] == b'R' && ![2, 7].contains(&kind) || bytes[3] == b'C' && kind == 7 {
                continue;
            }
            let (at, len) = record(&bytes, kind);
            let mut newer = bytes.clone();
            newer.splice(at + 6 + len..at + 6 + len, *b"new");
            newer[at + 2] += 3;
            newer[8] += 3;
            read(&newer).unwrap();
        }
    }
}

#[test]
fn a_record_that_is_missing_short_or_double_is_named() {
    for (bytes, read) in both() {
        let kinds: &[u16] = if bytes[3] == b'C' { &[1, 2, 3, 4, 5, 6] } else { &[2, 7] };
        for kind in kinds {
            let (at, len) = record(&bytes, *kind);
            let mut missing = bytes.clone();
            missing[at..at + 2].copy_from_slice(&900u16.to_le_bytes());
            let e = read(&missing).unwrap_err();
            assert_eq!(e.status, Status::BlobTruncated);
            assert!(e.message.contains(&format!("(type {kind}) is missing")), "{e}");

            let e = read(&with_record(bytes.clone(), *kind, &bytes[at + 6..][..len])).unwrap_err();
            assert_eq!(e.status, Status::Invalid);
            assert!(e.message.contains("twice"), "{e}");

            // One byte less (a name may be shorter), with every length mended.
            if *kind != 1 {
                let mut short = bytes.clone();
                short.remove(at + 6 + len - 1);
                short[at + 2] -= 1;
                short[8] -= 1;
                assert_eq!(read(&short).unwrap_err().status, Status::BlobTruncated);
            }
            // A record that claims more than there is.
            let mut long = bytes.clone();
            long[at + 5] = 0x7f;
            assert_eq!(read(&long).unwrap_err().status, Status::BlobTruncated);
        }
        let mut tiny = bytes.clone();
        tiny[8..12].copy_from_slice(&11u32.to_le_bytes());
        assert!(read(&tiny).unwrap_err().message.contains("11 bytes"));
    }
}

#[test]
fn values_out_of_range_are_refused_on_both_ways() {
    let cases: [(&str, Spoil); 4] = [
        ("name of 0 bytes; allowed: 1 to 255", |b| b.name.clear()),
        ("name of 256 bytes", |b| b.name = vec![b'n'; 256]),
        ("0 listener addresses; allowed: 1 to 16", |b| b.addrs.clear()),
        ("17 listener addresses", |b| b.addrs = vec![b.addrs[0]; 17]),
    ];
    for (text, spoil) in cases {
        let mut blob = conn();
        spoil(&mut blob);
        let e = blob.encode().unwrap_err();
        assert_eq!(e.status, Status::Invalid);
        assert!(e.message.contains(text), "{e}");
    }
    for (kind, body) in [(1, vec![]), (1, vec![b'n'; 256]), (4, vec![]), (4, vec![1; 6 * 17])] {
        let good = conn().encode().unwrap();
        let (at, len) = record(&good, kind);
        let mut bad = good[..at].to_vec();
        bad.extend(&good[at + 6 + len..]);
        let e = ConnBlob::decode(&with_record(bad, kind, &body)).unwrap_err();
        assert_eq!(e.status, Status::Invalid, "{e}");
    }
    for (base, len) in [(0, 0), (u64::MAX, 1), (1, u64::MAX)] {
        let blob = RegionBlob { base, len, ..region() };
        assert_eq!(blob.encode().unwrap_err().status, Status::Invalid);
        let mut bytes = region().encode().unwrap();
        bytes[48..56].copy_from_slice(&base.to_le_bytes());
        bytes[56..64].copy_from_slice(&len.to_le_bytes());
        let e = RegionBlob::decode(&bytes).unwrap_err();
        assert_eq!(e.status, Status::Invalid);
        assert!(e.message.contains(&len.to_string()), "{e}");
    }
}

fn any_conn() -> impl Strategy<Value = ConnBlob> {
    let addr = (any::<[u8; 4]>(), any::<u16>())
        .prop_map(|(ip, port)| SocketAddrV4::new(Ipv4Addr::from(ip), port));
    let offer = (any::<[u8; 16]>(), any::<u64>(), any::<u32>(), any::<u32>())
        .prop_map(|(boot_id, pid_ns, uid, pid)| HostOffer { boot_id, pid_ns, uid, pid });
    (
        prop::collection::vec(any::<u8>(), 1..=MAX_NAME),
        any::<[u8; 16]>(),
        any::<[u8; 32]>(),
        prop::collection::vec(addr, 1..=MAX_ADDRS),
        offer,
        any::<u32>(),
        prop::collection::vec(any_rail(), 0..=16),
    )
        .prop_map(|(name, incarnation, secret, addrs, offer, max_message, rails)| ConnBlob {
            name,
            incarnation,
            secret,
            addrs,
            offer,
            max_message,
            rails,
        })
}

fn any_rail() -> impl Strategy<Value = RailEnd> {
    let numbers =
        (any::<u32>(), any::<u32>(), any::<u8>(), any::<u8>(), any::<i16>(), any::<u32>());
    (any::<[u8; 4]>(), 0..=32u8, any::<[u8; 16]>(), numbers).prop_map(
        |(ip, prefix, gid, (mtu, max_msg, rd_initiator, rd_responder, numa, speed_mbps))| RailEnd {
            ipv4: ip.into(),
            prefix,
            gid,
            mtu,
            max_msg,
            rd_initiator,
            rd_responder,
            numa,
            speed_mbps,
        },
    )
}

proptest! {
    #[test]
    fn any_connection_blob_round_trips(blob in any_conn(), cut in any::<prop::sample::Index>()) {
        let bytes = blob.encode().unwrap();
        prop_assert!(ConnBlob::decode(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert_eq!(ConnBlob::decode(&bytes).unwrap(), blob);
    }

    #[test]
    fn any_region_blob_round_trips(incarnation: [u8; 16], slot: u32, generation: u32, base: u64,
                                   len in 0..1u64 << 44, mem: u32, rails in 0..17u8, key: u32) {
        let shift = 32;
        let pieces = (len.saturating_sub(1) >> shift) + 1;
        let keys = vec![key; pieces as usize * usize::from(rails)];
        // Without rails there is nothing to say about pieces.
        let shift = if rails == 0 { NO_SEAMS } else { shift };
        let keys = RegionKeys { shift, keys, rails };
        let blob = RegionBlob { incarnation, slot, generation, base, len, mem, keys };
        if let Ok(bytes) = blob.encode() {
            prop_assert_eq!(RegionBlob::decode(&bytes).unwrap(), blob);
        } else {
            prop_assert!(len == 0 || base.checked_add(len).is_none());
        }
    }

    #[test]
    fn noise_after_a_good_header_never_panics(which in 0..2usize, noise: Vec<u8>) {
        let (good, read) = &both()[which];
        let mut bytes = good[..12].to_vec();
        bytes[8..12].copy_from_slice(&(12 + noise.len() as u32).to_le_bytes());
        bytes.extend(&noise);
        // Six records of fixed sizes do not come from noise.
        prop_assert!(read(&bytes).is_err());
        let _ = read(&noise);
    }
}
