//! Why a verbs call failed: which call, with what, and what the device allows.

use core::fmt;

/// A verbs call that failed, or was not made because the device cannot do what was asked.
///
/// Plain data: it says what happened, who asked adds on which device and for whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// The call, as in C; for a queue pair with the step.
    pub call: &'static str,
    /// The error number of the call.
    pub errno: i32,
    /// What `asked` counts; empty: the call has no such value.
    pub what: &'static str,
    /// What was asked for.
    pub asked: u64,
    /// The most that the device or the protocol allows, where it is known.
    pub limit: Option<u64>,
}

impl Fault {
    /// `call` failed with `errno`.
    #[must_use]
    pub const fn new(call: &'static str, errno: i32) -> Fault {
        Fault { call, errno, what: "", asked: 0, limit: None }
    }

    /// The last call of this thread failed and left `errno`.
    pub(super) fn last(call: &'static str) -> Fault {
        Fault::new(call, rdma_core_sys::errno())
    }

    /// With what was asked for.
    #[must_use]
    pub const fn asking(self, what: &'static str, asked: u64, limit: Option<u64>) -> Fault {
        Fault { what, asked, limit, ..self }
    }

    /// What to do, where the error number tells.
    const fn advice(&self) -> &'static str {
        let register = matches!(self.call.as_bytes(), [b'i', b'b', b'v', b'_', b'r', b'e', ..]);
        match self.errno {
            libc::ENOMEM if register => {
                "; the limit of locked memory may be too low: raise RLIMIT_MEMLOCK (ulimit -l)"
            }
            libc::ENOMEM => {
                "; device or memory is exhausted: ask for less, or raise RLIMIT_MEMLOCK (ulimit -l)"
            }
            libc::EFAULT if register => "; the whole range must be mapped, and writable",
            libc::EOPNOTSUPP | libc::ENOSYS => "; device, driver or rdma-core cannot do this",
            libc::ENODEV => "; see `rdma link` for the devices that there are",
            libc::EADDRNOTAVAIL => "; see `ip address` and `rdma link` for what the port has",
            libc::EIO => "; the device is gone or broken: see the kernel's log",
            libc::EPERM | libc::EACCES => {
                "; the process may not use the device: see /dev/infiniband"
            }
            libc::ETIMEDOUT => "; the port may be down, or the peer out of reach",
            _ => "",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.call)?;
        if !self.what.is_empty() {
            write!(f, " with {} {}", self.what, self.asked)?;
        }
        if let Some(limit) = self.limit {
            write!(f, " (at most {limit})")?;
        }
        write!(f, ": errno {}{}", self.errno, self.advice())
    }
}

impl core::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_says_the_call_the_value_the_limit_and_what_to_do() {
        let fault = Fault::new("ibv_create_cq", libc::EINVAL).asking("entries", 70_000, Some(4096));
        assert_eq!(fault.to_string(), "ibv_create_cq with entries 70000 (at most 4096): errno 22");
        let fault = Fault::new("ibv_reg_mr", libc::ENOMEM).asking("bytes", 1 << 30, None);
        let text = fault.to_string();
        assert!(text.starts_with("ibv_reg_mr with bytes 1073741824: errno 12; "), "{text}");
        assert!(text.contains("RLIMIT_MEMLOCK"), "{text}");
        let text = Fault::new("ibv_open_device", libc::EPERM).to_string();
        assert!(text.contains("may not use the device"), "{text}");
    }
}
