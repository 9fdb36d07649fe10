//! How the queue pairs to a peer are opened: beside the engine, because to ask the peer takes as long as
//! it likes, and neither `submit` nor `completed` may wait.

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

/// What is opened, and for whom.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) inner: Arc<Inner>,
    pub(super) control: Arc<Control>,
    /// One a card.
    pub(super) cqs: Arc<[Arc<Cq>]>,
    pub(super) room: Room,
    /// Rings when it is over.
    pub(super) alarm: Arc<Alarm>,
}

/// Queue pairs to a peer, both ends open.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) strands: Vec<Strand>,
    pub(super) signal: SignalBy,
    pub(super) messages: Messages,
    /// Until when the peer may close its ends.
    pub(super) close_by: Option<Deadline>,
    /// The peer's number of the first one.
    lead: u32,
    control: Arc<Control>,
}

/// A place for the message of every request that may be posted on the first queue pair.
#[derive(Debug)]
pub(super) struct Messages {
    mr: Mr,
    memory: Mapping,
}

/// The answer that is waited for.
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
                // Who is gone by now drops the answer, which closes what was opened.
                let _ = sender.send(job.open());
                job.alarm.ring();
            })
            .map_err(Error::io("start a thread that opens queue pairs"))?;
        Ok(Self { answer, peer })
    }

    /// What was opened, once it is.
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

    /// One queue pair, and what the peer says of it.
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
        // Both are small: there are at most so many strands and cards.
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
    /// Ends them here and there.
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
        // SAFETY: the registration is dropped before the mapping, being the field before it.
        let mr = unsafe { inner.cards[0].domain.register(memory.base(), bytes) }?;
        Ok(Self { mr, memory })
    }

    /// Keeps the bytes of a message in a slot; their address and key.
    pub(super) fn keep(&self, slot: usize, bytes: &[u8]) -> (u64, u32) {
        let place = self.memory.base().as_ptr().wrapping_add(slot * MESSAGE_BYTES);
        // SAFETY: inside the mapping, which has a place a request; the request that used it last is
        // complete, since no more are posted than there are places.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        (place as u64, self.mr.local_key())
    }
}
