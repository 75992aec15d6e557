//! What only the kernel can say: the IPv4 addresses of this network namespace, and the NUMA node
//! of a page.

use core::ffi::CStr;
use core::net::Ipv4Addr;

use super::net::Addresses;

/// IPv4 addresses of every netdev, by `getifaddrs`. None when the kernel refuses.
pub(super) fn addresses() -> Addresses {
    let mut found = Addresses::default();
    let mut list: *mut libc::ifaddrs = core::ptr::null_mut();
    // SAFETY: I8: the pointer is a local that the call fills in.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return found;
    }
    let mut at = list.cast_const();
    while !at.is_null() {
        // SAFETY: I10: a link of the list, not yet freed.
        let entry = unsafe { &*at };
        if let (Some(ip), false) = (ipv4(entry.ifa_addr), entry.ifa_name.is_null()) {
            // SAFETY: I10: names of the list end in NUL.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy();
            let mask = ipv4(entry.ifa_netmask).unwrap_or(Ipv4Addr::BROADCAST);
            let prefix = u32::from(mask).leading_ones() as u8;
            // An address with a label is reported under it (`eth0:1`); no netdev has a colon.
            let netdev = name.split(':').next().unwrap_or(&name);
            found.insert(netdev, (ip, prefix));
        }
        at = entry.ifa_next;
    }
    // SAFETY: I10: the list came from the call above and is not used after this.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// The address in `at`, when it is one of IPv4.
fn ipv4(at: *const libc::sockaddr) -> Option<Ipv4Addr> {
    if at.is_null() {
        return None;
    }
    // SAFETY: I10: an address of the list, at least its family is there.
    let family = unsafe { (*at).sa_family };
    if i32::from(family) != libc::AF_INET {
        return None;
    }
    // SAFETY: I10: the family says that it is a `sockaddr_in`.
    let address = unsafe { at.cast::<libc::sockaddr_in>().read_unaligned() };
    Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)))
}

/// The NUMA node that holds the page at `addr`. `None` when the page was never touched, when there
/// is no such page, or when the kernel does not say (containers often forbid the call).
///
/// Nothing is read or written at `addr`, so any address may be asked for. Does not block.
#[must_use]
pub fn numa_of_address(addr: *const u8) -> Option<i32> {
    let page = addr.cast::<libc::c_void>();
    let mut node: libc::c_int = -1;
    let none: *const libc::c_int = core::ptr::null();
    let this_process: libc::pid_t = 0;
    // SAFETY: I8: one page address and one result, both locals; without a list of nodes the kernel
    // moves nothing and only answers.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            this_process,
            1 as libc::c_ulong,
            &raw const page,
            none,
            &raw mut node,
            0 as libc::c_int,
        )
    };
    (done == 0 && node >= 0).then_some(node)
}
