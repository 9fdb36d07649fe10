//! Wraps completion queues with their channels, shared receive queues and queue pairs.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use ibverbs_sys::*;

use super::{Context, Domain};
use crate::error::Error;

/// A completion queue with its completion channel, on which a thread can sleep.
#[derive(Debug)]
pub(crate) struct Cq {
    context: Arc<Context>,
    channel: NonNull<ibv_comp_channel>,
    raw: NonNull<ibv_cq>,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for Cq {}
// SAFETY: as above; polling locks the queue.
unsafe impl Sync for Cq {}

impl Cq {
    pub(crate) fn create(context: &Arc<Context>, completions: u32) -> Result<Self, Error> {
        let (library, device) = (context.library, &context.name);
        // SAFETY: the context is open.
        let channel = unsafe { (library.create_comp_channel)(context.raw()) };
        let channel =
            NonNull::new(channel).ok_or_else(|| Error::last("ibv_create_comp_channel", device))?;
        let count = c_int::try_from(completions).unwrap_or(c_int::MAX);
        let create = library.create_cq;
        // SAFETY: as above; the channel was just made.
        let raw = unsafe { create(context.raw(), count, null_mut(), channel.as_ptr(), 0) };
        let Some(raw) = NonNull::new(raw) else {
            let error = Error::last("ibv_create_cq", device);
            // SAFETY: the channel was just made, and no queue uses it.
            let _ = unsafe { (library.destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let made = Self { context: Arc::clone(context), channel, raw };
        let flags = rustix::fs::fcntl_getfl(made.fd());
        flags
            .and_then(|flags| {
                rustix::fs::fcntl_setfl(made.fd(), flags | rustix::fs::OFlags::NONBLOCK)
            })
            .map_err(Error::system("make a completion channel non-blocking"))?;
        Ok(made)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is destroyed when `self` is dropped.
        let fd = unsafe { (*self.channel.as_ptr()).fd };
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    pub(crate) fn poll(&self, completions: &mut [ibv_wc]) -> Result<usize, Error> {
        let room = c_int::try_from(completions.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue exists, and the slice has room for `room` completions.
        let taken = unsafe { poll_cq(self.raw.as_ptr(), room, completions.as_mut_ptr()) };
        usize::try_from(taken)
            .map_err(|_| Error::from_code("ibv_poll_cq", &self.context.name, taken))
    }

    pub(crate) fn request_event(&self) -> Result<(), Error> {
        // SAFETY: the queue exists until `self` is dropped.
        let code = unsafe { req_notify_cq(self.raw.as_ptr(), 0) };
        self.context.check("ibv_req_notify_cq", code)
    }

    /// Discards all pending events of the completion channel, which two threads must not do at the same time.
    pub(crate) fn drain_events(&self) {
        let library = self.context.library;
        let (mut queue, mut tag) = (null_mut(), null_mut());
        // SAFETY: the channel exists and does not block.
        while unsafe { (library.get_cq_event)(self.channel.as_ptr(), &mut queue, &mut tag) } == 0 {
            // SAFETY: one event of this queue was taken.
            unsafe { (library.ack_cq_events)(self.raw.as_ptr(), 1) };
        }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let library = self.context.library;
        // SAFETY: queue pairs keep their queues alive, so none is left. All events are acknowledged.
        let _ = unsafe { (library.destroy_cq)(self.raw.as_ptr()) };
        // SAFETY: the only queue of the channel was destroyed above.
        let _ = unsafe { (library.destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

/// A shared receive queue (`ibv_srq`), which provides the receive buffers of many queue pairs.
#[derive(Debug)]
pub(crate) struct Srq {
    domain: Arc<Domain>,
    raw: NonNull<ibv_srq>,
}

// SAFETY: as for `Cq`.
unsafe impl Send for Srq {}
// SAFETY: as for `Cq`.
unsafe impl Sync for Srq {}

impl Srq {
    pub(crate) fn create(domain: &Arc<Domain>, receives: u32) -> Result<Self, Error> {
        let attr = ibv_srq_attr { max_wr: receives, max_sge: 1, srq_limit: 0 };
        let mut attributes = ibv_srq_init_attr { srq_context: null_mut(), attr };
        let create = domain.context.library.create_srq;
        // SAFETY: the domain is open, and the structure has the layout of the library.
        let raw = unsafe { create(domain.raw.as_ptr(), &mut attributes) };
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::last("ibv_create_srq", &domain.context.name))?;
        Ok(Self { domain: Arc::clone(domain), raw })
    }

    /// Requests one event when fewer than `limit` receive buffers are left.
    pub(crate) fn set_limit(&self, limit: u32) -> Result<(), Error> {
        let mut attributes = ibv_srq_attr { srq_limit: limit, ..ibv_srq_attr::default() };
        let modify = self.domain.context.library.modify_srq;
        let mask = ibv_srq_attr_mask::LIMIT.bits().cast_signed();
        // SAFETY: the queue exists, and the structure has the layout of the library.
        let code = unsafe { modify(self.raw.as_ptr(), &mut attributes, mask) };
        self.domain.context.check("ibv_modify_srq", code)
    }

    /// Posts a chain of receive requests to the shared receive queue.
    ///
    /// # Safety
    /// The memory of the chain must stay registered until the requests complete.
    pub(crate) unsafe fn post(&self, chain: &mut ibv_recv_wr) -> Result<(), Error> {
        let mut bad = null_mut();
        // SAFETY: the queue exists; the caller keeps the memory registered.
        let code = unsafe { post_srq_recv(self.raw.as_ptr(), chain, &mut bad) };
        self.domain.context.check("ibv_post_srq_recv", code)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: queue pairs keep the queue alive, so none is left.
        let _ = unsafe { (self.domain.context.library.destroy_srq)(self.raw.as_ptr()) };
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct QpSizes {
    pub(crate) sends: u32,
    pub(crate) inline_bytes: u32,
}

#[derive(Debug)]
pub(crate) struct Qp {
    domain: Arc<Domain>,
    _completions: Arc<Cq>,
    _receives: Option<Arc<Srq>>,
    raw: NonNull<ibv_qp>,
    pub(crate) inline_bytes: u32,
}

// SAFETY: as for `Cq`.
unsafe impl Send for Qp {}
// SAFETY: as for `Cq`.
unsafe impl Sync for Qp {}

impl Qp {
    pub(crate) fn create(
        domain: &Arc<Domain>,
        completions: &Arc<Cq>,
        receives: Option<&Arc<Srq>>,
        sizes: QpSizes,
    ) -> Result<Self, Error> {
        let create = domain.context.library.create_qp;
        let mut inline_bytes = sizes.inline_bytes;
        loop {
            let mut attributes = ibv_qp_init_attr {
                send_cq: completions.raw.as_ptr(),
                recv_cq: completions.raw.as_ptr(),
                srq: receives.map_or(null_mut(), |srq| srq.raw.as_ptr()),
                cap: ibv_qp_cap {
                    max_send_wr: sizes.sends,
                    max_recv_wr: 0,
                    max_send_sge: 1,
                    max_recv_sge: 0,
                    max_inline_data: inline_bytes,
                },
                qp_type: ibv_qp_type::RC,
                ..ibv_qp_init_attr::default()
            };
            // SAFETY: domain and queues exist, and the structure has the layout of the library.
            let raw = unsafe { create(domain.raw.as_ptr(), &mut attributes) };
            if let Some(raw) = NonNull::new(raw) {
                return Ok(Self {
                    domain: Arc::clone(domain),
                    _completions: Arc::clone(completions),
                    _receives: receives.map(Arc::clone),
                    raw,
                    inline_bytes: attributes.cap.max_inline_data,
                });
            }
            let error = Error::last("ibv_create_qp", &domain.context.name);
            // No attribute reports the limit of inline data, so smaller sizes are tried.
            if inline_bytes == 0 {
                return Err(error);
            }
            inline_bytes /= 2;
            if inline_bytes < 32 {
                inline_bytes = 0;
            }
        }
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair exists, and its number never changes.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    pub(crate) fn modify(
        &self,
        attributes: &ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<(), Error> {
        let mut attributes = *attributes;
        let modify = self.domain.context.library.modify_qp;
        // SAFETY: the queue pair exists, and the structure has the layout of the library.
        let code = unsafe { modify(self.raw.as_ptr(), &mut attributes, mask.bits().cast_signed()) };
        self.domain.context.check("ibv_modify_qp", code)
    }

    /// Moves the queue pair to the error state, in which its work requests complete as flushed.
    pub(crate) fn fail(&self) {
        let attributes = ibv_qp_attr { qp_state: ibv_qp_state::ERR, ..ibv_qp_attr::default() };
        // The call may fail if the queue pair is in the error state already.
        let _ = self.modify(&attributes, ibv_qp_attr_mask::STATE);
    }

    /// Returns whether the NIC makes RDMA writes visible in order, so that a flag may be polled.
    pub(crate) fn writes_in_order(&self) -> bool {
        let query = self.domain.context.library.query_qp_data_in_order;
        // SAFETY: the queue pair exists, and the call changes nothing.
        let code =
            query.map(|query| unsafe { query(self.raw.as_ptr(), ibv_wr_opcode::RDMA_WRITE, 0) });
        code == Some(1)
    }

    /// Posts a chain of send requests to the queue pair.
    ///
    /// # Safety
    /// The chain must be valid, and its memory must stay registered until the requests complete.
    pub(crate) unsafe fn post(&self, chain: &mut ibv_send_wr) -> Result<(), Error> {
        let mut bad = null_mut();
        // SAFETY: the queue pair exists; the caller passes a valid chain and keeps the memory registered.
        let code = unsafe { post_send(self.raw.as_ptr(), chain, &mut bad) };
        self.domain.context.check("ibv_post_send", code)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: `self` is the only owner of the queue pair.
        let _ = unsafe { (self.domain.context.library.destroy_qp)(self.raw.as_ptr()) };
    }
}
