//! What a device tells without being asked.

use rdma_core_sys::*;

use super::device::Device;

/// An asynchronous event of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// This port lost its link.
    PortDown(u8),
    /// This port is active again.
    PortUp(u8),
    /// The GID table of this port changed: ask [`Device::gid`] again.
    GidChange(u8),
    /// The queue pair of this number is in error.
    QpFatal(u32),
    /// Nothing of this device works any more. After this one no event comes, and the file
    /// descriptor must not be waited for: it may be readable for ever.
    DeviceFatal,
    /// A completion queue overran or broke.
    CqError,
    /// An event of this type (`enum ibv_event_type`), which needs no answer.
    Other(u32),
}

impl Device {
    /// The next event, which is acknowledged at once. `None`: there is none now. Never waits; any
    /// one thread at a time.
    pub fn next_event(&self) -> Option<Event> {
        if self.is_dead() {
            return None;
        }
        let mut event = ibv_async_event::zeroed();
        // SAFETY: V20: an open device; the descriptor is non-blocking.
        let failed = unsafe { self.verbs().get_async_event(self.context(), &raw mut event) } != 0;
        if failed {
            return match errno() {
                libc::EAGAIN | libc::EINTR => None,
                // The kernel took the device away: it says so for ever, so it is told once.
                _ => self.died(),
            };
        }
        let told = match event.event_type {
            IBV_EVENT_PORT_ERR => Event::PortDown(port_of(&event)),
            IBV_EVENT_PORT_ACTIVE => Event::PortUp(port_of(&event)),
            IBV_EVENT_GID_CHANGE => Event::GidChange(port_of(&event)),
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
                Event::QpFatal(queue_pair_of(&event))
            }
            IBV_EVENT_CQ_ERR => Event::CqError,
            IBV_EVENT_DEVICE_FATAL => Event::DeviceFatal,
            other => Event::Other(other),
        };
        // SAFETY: V20: the event came from `get_async_event` and is released once.
        unsafe { self.verbs().ack_async_event(&raw mut event) };
        if told == Event::DeviceFatal {
            return self.died();
        }
        Some(told)
    }
}

/// Port number of a port event; 0 if it is none that a port can have.
fn port_of(event: &ibv_async_event) -> u8 {
    // SAFETY: V20: the types of event that this is called for carry a port number, and any bits are
    // an integer.
    u8::try_from(unsafe { event.element.port_num }).unwrap_or(0)
}

/// Number of the queue pair of a queue pair event.
fn queue_pair_of(event: &ibv_async_event) -> u32 {
    // SAFETY: V20: the types of event that this is called for carry a queue pair, and any bits are
    // a pointer.
    let qp = unsafe { event.element.qp };
    if qp.is_null() {
        return 0;
    }
    // SAFETY: V22: a queue pair's destruction waits until its events are acknowledged, and this one
    // is not yet.
    unsafe { (*qp).qp_num }
}
