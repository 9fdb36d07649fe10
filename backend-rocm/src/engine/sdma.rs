//! The engine over SDMA engines, which its rank drives.
//!
//! | the contract | here |
//! | --- | --- |
//! | put, get | `hsa_amd_memory_async_copy_on_engine`, in pieces of at most 128 MiB, large ones over all engines of the link; `hsa_amd_memory_async_copy` where the runtime cannot take an engine's name |
//! | signal | a flag that this process maps is stored by the host once everything before it is complete; another one by a copy of 8 bytes that depends on everything before it |
//! | a signal to oneself | the same, once everything before it is complete at all peers |
//! | ticket, `completed` | the completion signals of the copies, which the host looks at |
//! | `release` | drops what no engine has; a copy needs nobody else to end |
//!
//! No waits are queued. An engine can wait for a signal to become 0 and for nothing else, and a flag is
//! to be waited for until it is *at least* a value, whoever wrote it: the rank's other fabrics, the
//! host, a NIC. So [`Caps::queued_wait`] is false, flags lie where the host reads them, and no stream of
//! the caller can be forked from. Signals that processes share (`hsa_amd_ipc_signal_create`) do not help
//! either: they count down by one and hold no value.

mod chain;
#[cfg(test)]
mod fake;
mod hardware;
mod hsa;
mod loads;
mod open;
mod placement;
mod queue;
mod slots;
mod stripe;

use std::ptr::NonNull;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{At, Caps, Deadline, Op, Rank, Ticket};
use peerlane_toolkit::device::Fault;
use peerlane_toolkit::places::{PeerPlace, Place, Reach, check_slice, flag_within, within};
use peerlane_toolkit::{Parker, Poison};

use self::chain::{FlagPlace, Work};
use self::hardware::{Direction, Hardware, Span};
use self::hsa::HsaHardware;
use self::queue::{Queue, Request, Ways};

pub(crate) use self::open::striped_rate;

/// Most ops of a slice.
const SLICE_OPS_MAX: usize = 256;
/// Ops that are not complete, of all slices.
const QUEUE_OPS: usize = 1024;
/// A flag changes without anybody who wakes, so a sleeper looks longer without a pause than one whose
/// device waits, and naps less.
const SPIN: Duration = Duration::from_micros(100);
const NAP_MAX: Duration = Duration::from_micros(50);
/// How long the engines may take to finish when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An in-order queue over SDMA engines, driven by its caller.
#[derive(Debug)]
pub(crate) struct Sdma<H: Hardware = HsaHardware> {
    queue: Queue<H>,
    caps: Caps,
    reach: Reach,
    requests: Vec<Request>,
    parker: Parker,
    poison: Poison<H::Error>,
    released: bool,
}

/// How copies to and from a peer are done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SdmaWay {
    /// The peer, oneself too.
    pub peer: Rank,
    /// The SDMA engines of puts, and who chose them, such as `SDMA 4+5 (of those idle)`.
    pub put: String,
    /// Those of gets.
    pub get: String,
}

impl<H: Hardware> Sdma<H> {
    /// An engine of `rank` that reaches the ranks with a way.
    fn over(hardware: H, rank: Rank, ways: Vec<Option<Ways>>) -> Self {
        let reached = ways.iter().enumerate().filter(|(_, way)| way.is_some());
        let reach = Reach::new(rank, reached.map(|(index, _)| Rank::at(index)));
        let caps = Caps {
            kind: "sdma",
            queued_wait: false,
            polled: true,
            flags_batched: false,
            slice_ops_max: SLICE_OPS_MAX,
            piece_bytes_max: stripe::PIECE_BYTES_MAX,
            put_align_bytes: 1,
        };
        Self {
            queue: Queue::new(hardware, rank.index(), ways, (QUEUE_OPS, caps.piece_bytes_max)),
            caps,
            reach,
            requests: Vec::with_capacity(SLICE_OPS_MAX),
            parker: Parker::new(SPIN, NAP_MAX),
            poison: Poison::new(),
            released: false,
        }
    }

    /// How its peers are reached now.
    pub(crate) fn ways(&self) -> Vec<SdmaWay> {
        let ways = self.queue.ways().map(|(peer, ways)| SdmaWay {
            peer: Rank::at(peer),
            put: ways.put.to_string(),
            get: ways.get.to_string(),
        });
        ways.collect()
    }

    /// Resolves a slice into `requests`; zero bytes vanish.
    fn resolve<L: Place, R: PeerPlace>(&mut self, ops: &[Op<'_, L, R>]) -> Result<(), Fault> {
        self.requests.clear();
        for op in ops {
            let (peer, work) = match *op {
                Op::Put { dst, src, bytes } => {
                    let dst_address = address_of("put destination", dst, bytes)?;
                    let src_address = address_of("put source", src, bytes)?;
                    let span = Span { dst: dst_address, src: src_address, bytes };
                    (self.reach.peer_of(dst.region)?, copy(Direction::Put, span))
                }
                Op::Get { dst, src, bytes } => {
                    let dst_address = address_of("get destination", dst, bytes)?;
                    let src_address = address_of("get source", src, bytes)?;
                    let span = Span { dst: dst_address, src: src_address, bytes };
                    (self.reach.peer_of(src.region)?, copy(Direction::Get, span))
                }
                Op::Signal { flag, value } => {
                    let at = flag_within("signalled flag", flag.word, flag.region)?;
                    let host = flag.region.host_address().map(|base| (base + at) as *mut _);
                    let place = match host.and_then(NonNull::new) {
                        Some(place) => FlagPlace::Host(place),
                        None => FlagPlace::Device(flag.region.address() + at),
                    };
                    let work = Work::Signal { flag: place, value };
                    (self.reach.peer_of(flag.region)?, Some(work))
                }
                Op::Wait { .. } => {
                    return Err(Fault::Argument(
                        "a wait was submitted to an engine without queued_wait; poll the flag instead"
                            .to_owned(),
                    ));
                }
            };
            let request = work.map(|work| Request { peer: peer.index(), work });
            self.requests.extend(request);
        }
        Ok(())
    }

    fn drive(&mut self) -> Result<(), H::Error> {
        // SAFETY: `submit`'s contract: what was pushed lives until its ticket completes.
        let driven = unsafe { self.queue.drive() };
        if self.poison.keep(driven)? {
            self.parker.busy();
        }
        Ok(())
    }

    /// What it can do.
    pub(crate) fn caps(&self) -> &Caps {
        &self.caps
    }

    /// # Safety
    /// As [`CopyEngine::submit`](peerlane_hal::CopyEngine::submit).
    pub(crate) unsafe fn submit<L: Place, R: PeerPlace>(
        &mut self,
        ops: &[Op<'_, L, R>],
    ) -> Result<Ticket, H::Error> {
        self.poison.check()?;
        if self.released {
            return Err(Fault::Released.into());
        }
        check_slice(ops.len(), SLICE_OPS_MAX)?;
        let (queued, room) = (self.queue.len(), QUEUE_OPS);
        // Slices without ops take tickets, which have no more room than ops.
        if queued + ops.len() > room || self.queue.ledger().open() >= room {
            return Err(Fault::QueueFull { queued, room, wanted: ops.len() }.into());
        }
        self.resolve(ops)?;
        let ticket = self.queue.push(&self.requests);
        self.parker.busy();
        self.drive()?;
        Ok(ticket)
    }

    pub(crate) fn completed(&mut self) -> Result<Ticket, H::Error> {
        self.poison.check()?;
        self.drive()?;
        Ok(self.queue.ledger().completed())
    }

    pub(crate) fn park(&mut self, limit: Duration) -> Result<(), H::Error> {
        self.poison.check()?;
        let queue = &self.queue;
        self.parker.park(limit, || queue.has_news());
        Ok(())
    }

    pub(crate) fn waker(&self) -> Waker {
        self.parker.waker()
    }

    pub(crate) fn release(&mut self) -> Result<(), H::Error> {
        self.released = true;
        // Also of a poisoned engine: what looks at a copy that failed holds an SDMA engine.
        self.queue.release();
        self.poison.check()
    }
}

impl<H: Hardware> Drop for Sdma<H> {
    fn drop(&mut self) {
        self.queue.close(Deadline::after(CLOSE_TIMEOUT));
    }
}

fn copy(direction: Direction, span: Span) -> Option<Work> {
    (span.bytes > 0).then_some(Work::Copy { direction, span })
}

fn address_of<P: Place>(what: &str, at: At<'_, P>, bytes: u64) -> Result<u64, Fault> {
    Ok(at.region.address() + within(what, at.offset, bytes, at.region.bytes())?)
}

#[cfg(test)]
mod tests;
