//! Opens the queue pairs to a peer on a thread: the peer's answer may take long, and neither `submit` nor
//! `completed` may wait for it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use peerlane_hal::{Deadline, Rank};
use peerlane_toolkit::device::Fault;
use peerlane_toolkit::mapping::Mapping;

use super::CLOSE_TIMEOUT;
use super::strand::{Room, Strand};
use crate::error::Error;
use crate::fabric::{Alarm, Control, End, Inner, MESSAGE_BYTES, SignalBy, receive_from, send_to};
use crate::fabric::{Opening as Question, Strand as Place};
use crate::sys::{Cq, Mr, Qp, QpSizes};

/// What the connecting thread needs.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) inner: Arc<Inner>,
    pub(super) control: Arc<Control>,
    /// One completion queue per NIC.
    pub(super) cqs: Arc<[Arc<Cq>]>,
    pub(super) room: Room,
    /// Notified at the end.
    pub(super) alarm: Arc<Alarm>,
}

/// Queue pairs to a peer, open on both sides.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) strands: Vec<Strand>,
    pub(super) signal: SignalBy,
    pub(super) messages: Messages,
    /// Deadline for the peer to close its queue pairs.
    pub(super) close_by: Option<Deadline>,
    /// The peer's number of the primary queue pair.
    lead: u32,
    control: Arc<Control>,
}

/// One message buffer per request that may be posted on the primary queue pair.
#[derive(Debug)]
pub(super) struct Messages {
    mr: Mr,
    memory: Mapping,
}

/// The pending result of the thread.
#[derive(Debug)]
pub(super) struct Opening {
    answer: Receiver<Result<Opened, Error>>,
    peer: Rank,
}

impl Opening {
    pub(super) fn start(job: Job) -> Result<Self, Error> {
        let peer = job.control.peer;
        let (sender, answer) = sync_channel(1);
        std::thread::Builder::new()
            .name("peerlane-open".to_owned())
            .spawn(move || {
                // If the engine was dropped, so is the result, which closes the queue pairs.
                let _ = sender.send(job.open());
                job.alarm.ring();
            })
            .map_err(Error::io("start a thread that opens queue pairs"))?;
        Ok(Self { answer, peer })
    }

    /// Returns the open queue pairs once they are ready.
    pub(super) fn poll(&self) -> Result<Option<Opened>, Error> {
        match self.answer.try_recv() {
            Ok(opened) => opened.map(Some),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                let how = "the thread that opened queue pairs has ended".to_owned();
                Err(Fault::PeerLost { peer: self.peer, how }.into())
            }
        }
    }
}

impl Job {
    fn open(&self) -> Result<Opened, Error> {
        let deadline = Deadline::after(self.inner.options.open_timeout);
        let count = self.inner.strands(self.control.cards);
        let (first, lead, signal) = self.strand(0, None, deadline)?;
        let messages = Messages::new(&self.inner, self.room)?;
        let control = Arc::clone(&self.control);
        let strands = vec![first];
        let mut opened = Opened { strands, signal, messages, close_by: None, lead, control };
        for index in 1..count {
            let (strand, ..) = self.strand(index, Some(lead), deadline)?;
            opened.strands.push(strand);
        }
        for strand in &mut opened.strands {
            strand.room.bytes = (self.room.bytes / count as u64).max(1);
        }
        Ok(opened)
    }

    /// Opens one queue pair; returns also the peer's number of it, and how signals are sent.
    fn strand(
        &self,
        index: usize,
        lead: Option<u32>,
        deadline: Deadline,
    ) -> Result<(Strand, u32, SignalBy), Error> {
        let Self { inner, control, room, .. } = self;
        let options = &inner.options;
        let (number, peer_card) = (index % inner.cards.len(), index % control.cards);
        let card = &inner.cards[number];
        let sizes = QpSizes { sends: room.requests, inline_bytes: options.inline_bytes };
        let qp = Qp::create(&card.domain, &self.cqs[number], None, sizes)?;
        let own = End::of(&qp, &card.place)?;
        // Both fit: there are at most `STRANDS_MAX` rails and `CARDS_MAX` NICs.
        let place = Place { lead, index: index as u8 };
        let question =
            Question { end: own, strand: place, card: peer_card as u8, signal: options.signal };
        let (other, signal) = control.open_pair(question, deadline)?;
        receive_from(&qp, &card.place, options, &own, &other)?;
        send_to(&qp, options, &own, &other)?;
        let strand = Strand::new(qp, (number, peer_card), (control.peer.index(), index), *room);
        Ok((strand, other.pair, signal))
    }
}

impl Drop for Opened {
    /// Closes the queue pairs on both sides.
    fn drop(&mut self) {
        self.strands.drain(..).for_each(|strand| strand.qp.fail());
        let deadline = self.close_by.unwrap_or_else(|| Deadline::after(CLOSE_TIMEOUT));
        self.control.close_pairs(self.lead, deadline);
    }
}

impl Messages {
    fn new(inner: &Inner, room: Room) -> Result<Self, Error> {
        let bytes = room.requests as usize * MESSAGE_BYTES;
        let memory = Mapping::create(bytes as u64).map_err(Error::of_mapping)?;
        // SAFETY: the mapping outlives the registration, whose field is declared first.
        let mr = unsafe { inner.cards[0].domain.register(memory.base(), bytes) }?;
        Ok(Self { mr, memory })
    }

    /// Copies a message into a slot; returns the address and local key of the copy.
    pub(super) fn keep(&self, slot: usize, bytes: &[u8]) -> (u64, u32) {
        let place = self.memory.base().as_ptr().wrapping_add(slot * MESSAGE_BYTES);
        // SAFETY: the slot is inside the mapping, which has one per request. The request that used the slot
        // before is complete, since no more requests are posted than there are slots.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        (place as u64, self.mr.local_key())
    }
}
