//! The queue of a caller: checks ops against their regions, and hands them to the stage.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{
    Caps, CopyEngine, Deadline, ErrorKind, Fabric, Op, Role, StreamOrdered, Ticket,
};

use super::Shared;
use super::error::Error;
use super::memory::{Local, Remote};
use super::outbound::Work;
use super::stage::{BUSY_PARK_MAX, QUEUE_OPS};

/// How long what is under way may take when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// An op with the index of its peer.
type Addressed<D, N> = (usize, Work<D, N>);

/// An in-order queue through the host, driven by its caller.
pub struct Engine<D: Fabric, N: Fabric> {
    id: u64,
    /// Of the network; nothing is submitted to it, but it sleeps and wakes as the network does.
    parker: N::Engine,
    caps: Caps,
    released: bool,
    shared: Arc<Shared<D, N>>,
}

impl<D: Fabric, N: Fabric> Engine<D, N> {
    pub(super) fn new(id: u64, parker: N::Engine, caps: Caps, shared: Arc<Shared<D, N>>) -> Self {
        Self { id, parker, caps, released: false, shared }
    }

    fn aligned(&self, what: &str, numbers: [u64; 3]) -> Result<(), Error> {
        let align = self.caps.put_align_bytes;
        match numbers.into_iter().find(|number| !number.is_multiple_of(align)) {
            None => Ok(()),
            Some(odd) => Err(Error::argument(format!(
                "a {what} has an offset or length of {odd}, wanted a multiple of {align} bytes"
            ))),
        }
    }

    /// An op with its peer; `None` if it has no bytes.
    fn resolve(
        &self,
        op: &Op<'_, Local<D, N>, Remote<D, N>>,
    ) -> Result<Option<Addressed<D, N>>, Error> {
        let work = match *op {
            Op::Put { dst, src, bytes } => {
                self.aligned("put", [dst.offset, src.offset, bytes])?;
                within("put destination", dst.offset, bytes, dst.region.0.bytes)?;
                within("put source", src.offset, bytes, src.region.registered.bytes)?;
                let (to, from) = (dst.offset, src.offset);
                let (dst, src) = (Arc::clone(&dst.region.0), Arc::clone(&src.region.registered));
                (dst.peer, Work::Put { dst, to, src, from, bytes })
            }
            Op::Get { dst, src, bytes } => {
                self.aligned("get", [dst.offset, src.offset, bytes])?;
                within("get destination", dst.offset, bytes, dst.region.registered.bytes)?;
                within("get source", src.offset, bytes, src.region.0.bytes)?;
                let (to, from) = (dst.offset, src.offset);
                let (dst, src) = (Arc::clone(&dst.region.registered), Arc::clone(&src.region.0));
                (src.peer, Work::Get { dst, to, src, from, bytes })
            }
            Op::Signal { flag, value } => {
                let region = &flag.region.0;
                if region.role == Role::Data {
                    return Err(Error::argument(
                        "the signalled flag lies in a region registered as Data, wanted Flags"
                            .to_owned(),
                    ));
                }
                // Saturated, the end overflows and is refused.
                let at = flag.word.saturating_mul(WORD_BYTES);
                within("signalled flag", at, WORD_BYTES, region.bytes)?;
                let work = Work::Signal { flag: Arc::clone(region), word: flag.word, value };
                return Ok(Some((region.peer.index(), work)));
            }
            Op::Wait { .. } => {
                return Err(Error::argument(
                    "a wait was submitted to an engine without queued_wait; poll the flag instead"
                        .to_owned(),
                ));
            }
        };
        let (Op::Put { bytes, .. } | Op::Get { bytes, .. }) = *op else { return Ok(None) };
        let (peer, work) = work;
        Ok((bytes > 0).then_some((peer.index(), work)))
    }
}

impl<D: Fabric, N: Fabric> CopyEngine for Engine<D, N> {
    type Error = Error;
    type Local = Local<D, N>;
    type Remote = Remote<D, N>;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Local<D, N>, Remote<D, N>>],
    ) -> Result<Ticket, Error> {
        let mut stage = self.shared.stage();
        stage.check()?;
        if self.released {
            return Err(Error::new(ErrorKind::Aborted, "the engine was released"));
        }
        let slice_ops_max = self.caps.slice_ops_max;
        if ops.len() > slice_ops_max {
            return Err(Error::argument(format!(
                "a slice has {} ops, wanted at most slice_ops_max = {slice_ops_max}",
                ops.len()
            )));
        }
        let queue = stage.queue(self.id);
        // Slices without ops take tickets, which have no more room than ops.
        if queue.len() + ops.len() > QUEUE_OPS || queue.ledger.open() >= QUEUE_OPS {
            let (queued, wanted) = (queue.len(), ops.len());
            let text = format!("the queue holds {queued} of {QUEUE_OPS} ops, no room for {wanted}");
            return Err(Error::new(ErrorKind::QueueFull, text));
        }
        let works: Result<Vec<_>, Error> =
            ops.iter().filter_map(|op| self.resolve(op).transpose()).collect();
        let ticket = queue.push(works?.into_iter());
        stage.drive(self.id)?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        // A look of the parker too, so that what comes behind it ends the next park.
        self.parker.completed().map_err(Error::backend("look at the network"))?;
        let mut stage = self.shared.stage();
        stage.drive(self.id)?;
        Ok(stage.completed(self.id))
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        let busy = {
            let stage = self.shared.stage();
            stage.check()?;
            stage.is_busy()
        };
        let limit = if busy { limit.min(BUSY_PARK_MAX) } else { limit };
        self.parker.park(limit).map_err(Error::backend("sleep"))
    }

    /// Copies and messages under way move without this rank; see `park` for how long it sleeps beside them.
    fn is_busy(&self) -> bool {
        self.parker.is_busy()
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        let mut stage = self.shared.stage();
        stage.check()?;
        if !std::mem::replace(&mut self.released, true) {
            stage.release(self.id);
        }
        stage.drive(self.id)
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl<D: Fabric, N: Fabric> Drop for Engine<D, N> {
    fn drop(&mut self) {
        let mut stage = self.shared.stage();
        stage.release(self.id);
        // What is under way still uses the caller's memory.
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        while stage.queue(self.id).len() > 0 && !deadline.has_passed() {
            if stage.drive(self.id).is_err() {
                break;
            }
        }
        stage.leave(self.id);
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Engine<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("id", &self.id).finish_non_exhaustive()
    }
}

fn within(what: &str, offset: u64, bytes: u64, region_bytes: u64) -> Result<(), Error> {
    match offset.checked_add(bytes) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(Error::argument(format!(
            "{what} spans {bytes} bytes from offset {offset}, the region has {region_bytes}"
        ))),
    }
}
