//! Posts several requests with one doorbell.

use ibverbs_sys::{ibv_send_wr, ibv_sge};

use crate::error::Error;
use crate::sys::Qp;

/// Maximum number of requests in a chain, inclusive.
const REQUESTS_MAX: usize = 64;

/// Requests and their scatter-gather entries, in buffers that are allocated once.
#[derive(Debug)]
pub(super) struct Chain {
    requests: Vec<ibv_send_wr>,
    places: Vec<ibv_sge>,
}

// SAFETY: the pointers in the requests are set and used in `post` only.
unsafe impl Send for Chain {}

impl Chain {
    pub(super) fn new() -> Self {
        let requests = Vec::with_capacity(REQUESTS_MAX);
        Self { requests, places: Vec::with_capacity(REQUESTS_MAX) }
    }

    /// Adds a request; without an entry it has no bytes. Posts the chain first if it is full.
    pub(super) fn push(
        &mut self,
        qp: &Qp,
        mut request: ibv_send_wr,
        place: Option<ibv_sge>,
    ) -> Result<(), Error> {
        if self.requests.len() == REQUESTS_MAX {
            self.post(qp)?;
        }
        request.num_sge = place.is_some().into();
        self.requests.push(request);
        self.places.push(place.unwrap_or_default());
        Ok(())
    }

    /// Posts all requests.
    pub(super) fn post(&mut self, qp: &Qp) -> Result<(), Error> {
        let mut next = std::ptr::null_mut();
        for (request, place) in self.requests.iter_mut().zip(&mut self.places).rev() {
            request.next = next;
            request.sg_list = place;
            next = request;
        }
        let posted = match self.requests.first_mut() {
            // SAFETY: the chain was just built and lives for the call; `submit`'s contract keeps the memory of
            // copies alive, and messages lie in buffers of the endpoint.
            Some(first) => unsafe { qp.post(first) },
            None => Ok(()),
        };
        self.requests.clear();
        self.places.clear();
        posted
    }
}
