//! Opens the queue pairs to a peer on a background thread.
//!
//! The peer's answer may take long, and neither `submit` nor `completed` may wait for it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use peerlane_hal::{Deadline, Rank};
use peerlane_toolkit::limits::spawn;
use peerlane_toolkit::mapping::Mapping;
use peerlane_toolkit::{Fault, WakeupEvent};

use super::rail::{Rail, RailLimits};
use crate::connection::{Control, OpenRequest, QpRole, Resources};
use crate::error::Error;
use crate::nic::{self, MESSAGE_BYTES, QpAddress};
use crate::options::SignalBy;
use crate::sys::{Cq, Mr, Qp, QpSizes};

/// The time limit for peers to close their queue pairs when an engine is dropped.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct ConnectJob {
    pub(super) resources: Arc<Resources>,
    pub(super) control: Arc<Control>,
    pub(super) cqs: Arc<[Arc<Cq>]>,
    pub(super) limits: RailLimits,
    pub(super) wakeup: Arc<WakeupEvent>,
}

/// The queue pairs of an engine to a peer, which both ranks close when this value is dropped.
#[derive(Debug)]
pub(super) struct Connected {
    pub(super) rails: Vec<Rail>,
    pub(super) signal: SignalBy,
    pub(super) messages: MessageBuffers,
    pub(super) close_by: Option<Deadline>,
    primary: u32,
    control: Arc<Control>,
}

#[derive(Debug)]
pub(super) struct MessageBuffers {
    mr: Mr,
    memory: Mapping,
}

#[derive(Debug)]
pub(super) struct Connecting {
    result: Receiver<Result<Connected, Error>>,
    peer: Rank,
}

impl Connecting {
    pub(super) fn start(job: ConnectJob) -> Result<Self, Error> {
        let peer = job.control.peer;
        let (sender, result) = sync_channel(1);
        let run = move || {
            // If the engine was dropped, so is the result, which closes the queue pairs.
            let _ = sender.send(job.run());
            job.wakeup.notify();
        };
        spawn("peerlane-open", run).map_err(Fault::from)?;
        Ok(Self { result, peer })
    }

    pub(super) fn poll(&self) -> Result<Option<Connected>, Error> {
        match self.result.try_recv() {
            Ok(connected) => connected.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                let how = "the thread that opened queue pairs has ended".to_owned();
                Err(Fault::PeerLost { peer: self.peer, how }.into())
            }
        }
    }
}

impl ConnectJob {
    fn run(&self) -> Result<Connected, Error> {
        let deadline = Deadline::after(self.resources.options.open_timeout);
        let count = self.resources.rails(self.control.nics);
        let (first, primary, signal) = self.open_rail(0, None, deadline)?;
        let messages = MessageBuffers::new(&self.resources, self.limits)?;
        let control = Arc::clone(&self.control);
        let rails = vec![first];
        // Created before the other rails are opened, so that an error closes the first.
        let mut connected = Connected { rails, signal, messages, close_by: None, primary, control };
        for index in 1..count {
            let (rail, ..) = self.open_rail(index, Some(primary), deadline)?;
            connected.rails.push(rail);
        }
        for rail in &mut connected.rails {
            rail.limits.bytes = (self.limits.bytes / count as u64).max(1);
        }
        Ok(connected)
    }

    fn open_rail(
        &self,
        index: usize,
        primary: Option<u32>,
        deadline: Deadline,
    ) -> Result<(Rail, u32, SignalBy), Error> {
        let Self { resources, control, limits, .. } = self;
        let options = &resources.options;
        let (nic_index, peer_nic) = (index % resources.nics.len(), index % control.nics);
        let nic = &resources.nics[nic_index];
        let sizes = QpSizes { sends: limits.requests, inline_bytes: options.inline_bytes };
        let qp = Qp::create(&nic.domain, &self.cqs[nic_index], None, sizes)?;
        let local = QpAddress::new(&qp, &nic.port)?;
        let request = OpenRequest {
            address: local,
            // Both fit: there are at most `RAILS_MAX` rails and `NICS_MAX` NICs.
            role: QpRole { primary, index: index as u8 },
            nic: peer_nic as u8,
            signal: options.signal,
        };
        let (remote, signal) = control.open_queue_pair(request, deadline)?;
        nic::move_to_rtr(&qp, &nic.port, options, &local, &remote)?;
        nic::move_to_rts(&qp, options, &local, &remote)?;
        let rail = Rail::new(qp, (nic_index, peer_nic), (control.peer.index(), index), *limits);
        Ok((rail, remote.qp_num, signal))
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.rails.drain(..).for_each(|rail| rail.qp.fail());
        let deadline = self.close_by.unwrap_or_else(|| Deadline::after(CLOSE_TIMEOUT));
        self.control.close_queue_pairs(self.primary, deadline);
    }
}

impl MessageBuffers {
    fn new(resources: &Resources, limits: RailLimits) -> Result<Self, Error> {
        let bytes = limits.requests as usize * MESSAGE_BYTES;
        let memory = Mapping::create(bytes as u64).map_err(Error::mapping)?;
        // SAFETY: the mapping outlives the registration, whose field is declared first.
        let mr = unsafe { resources.nics[0].domain.register(memory.base(), bytes) }?;
        Ok(Self { mr, memory })
    }

    pub(super) fn write(&self, slot: usize, bytes: &[u8]) -> (u64, u32) {
        let buffer = self.memory.base().as_ptr().wrapping_add(slot * MESSAGE_BYTES);
        // SAFETY: the slot is inside the mapping, which has one per request. The request that used the slot
        // before is complete, since no more requests are in flight than there are slots.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer, bytes.len()) };
        (buffer as u64, self.mr.local_key())
    }
}
