//! Runs ops in order, whenever the caller submits or polls.
//!
//! A device runs them by itself. Then `submit` writes descriptors and rings a doorbell, `completed`
//! reads the counter of the device, and `Caps::polled` is false. If the device cannot wait for a
//! flag, set `Caps::queued_wait` to false; the executor then polls.

use std::collections::VecDeque;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{At, Caps, CopyEngine, Op, Reducer, StreamOrdered, Ticket};
use peerlane_toolkit::{EngineRegion, EngineState, TicketCounter, TimedParker};

use crate::memory::{Local, Remote};
use crate::{Error, device};

pub(crate) const CAPS: Caps = Caps {
    queued_wait: true,
    gets: true,
    polled: true,
    slice_ops_max: 64,
    ..Caps::new("loopback")
};
const QUEUE_OPS: usize = 256;

/// An in-order queue of ops.
#[derive(Debug)]
pub struct Engine {
    state: EngineState<Error>,
    queue: VecDeque<(Ticket, Command)>,
    tickets: TicketCounter,
    parker: TimedParker,
}

/// An op with the addresses of the device.
#[derive(Clone, Copy, Debug)]
enum Command {
    Copy { dst: u64, src: u64, bytes: u64 },
    Signal { flag: u64, value: u64 },
    Wait { flag: u64, value: u64, reset: bool },
}

impl Command {
    fn from_op(op: &Op<'_, Local, Remote>) -> Result<Self, Error> {
        Ok(match *op {
            Op::Put { dst, src, bytes } => Self::copy(dst, src, bytes),
            Op::Get { dst, src, bytes } => Self::copy(dst, src, bytes),
            Op::Signal { flag, value } => {
                Self::Signal { flag: flag.region.flag_address(flag.word), value }
            }
            Op::Wait { flag, value, reset } => {
                Self::Wait { flag: flag.region.flag_address(flag.word), value, reset }
            }

            // The capabilities say so already, and the check of the slice refuses these ops.
            Op::PutRows { .. } | Op::GetRows { .. } | Op::Reduce { .. } => {
                return Err(Error::refused_op(op));
            }
            #[cfg(not(peerlane_workspace))]
            _ => return Err(Error::refused_op(op)),
        })
    }

    fn copy(dst: At<'_, impl EngineRegion>, src: At<'_, impl EngineRegion>, bytes: u64) -> Self {
        let (dst, src) = (dst.region.address_at(dst.offset), src.region.address_at(src.offset));
        Self::Copy { dst, src, bytes }
    }

    /// Runs the command if it can run now, and returns whether it did.
    fn run(self) -> bool {
        match self {
            // SAFETY: the check of the slice bounded both ranges, and the contract of `submit`
            // keeps the regions alive.
            Self::Copy { dst, src, bytes } => unsafe { device::copy(dst, src, bytes) },
            // SAFETY: the check of the slice has found the flag in its region, which is kept alive.
            Self::Signal { flag, value } => unsafe { device::store(flag, value) },

            Self::Wait { flag, value, reset } => {
                // SAFETY: the check of the slice has found the flag in its region, which is kept
                // alive.
                if unsafe { device::load(flag) } < value {
                    return false;
                }

                if reset {
                    // SAFETY: the flag is that of the load.
                    unsafe { device::store(flag, 0) };
                }
            }
        }
        true
    }
}

impl Engine {
    pub(crate) fn new() -> Self {
        Self {
            state: EngineState::new(CAPS),
            queue: VecDeque::with_capacity(QUEUE_OPS),
            tickets: TicketCounter::with_capacity(QUEUE_OPS),
            parker: TimedParker::new(Duration::from_micros(20), Duration::from_micros(200)),
        }
    }

    fn run(&mut self) {
        while let Some(&(ticket, command)) = self.queue.front() {
            if !command.run() {
                return;
            }
            self.queue.pop_front();
            self.tickets.finish_op(ticket);
            self.parker.busy();
        }
    }
}

// SAFETY: ops are checked against their regions, and tickets complete after their ops.
unsafe impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Error> {
        Ok(None)
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        self.state.check_slice(ops)?;
        self.tickets.check_room(self.queue.len(), ops.len())?;
        let commands: Vec<_> = ops.iter().map(Command::from_op).collect::<Result<_, _>>()?;

        let ticket = self.tickets.issue(u32::try_from(ops.len()).unwrap_or(u32::MAX));
        self.queue.extend(commands.into_iter().map(|command| (ticket, command)));
        self.run();
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.state.check()?;
        self.run();
        Ok(self.tickets.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.state.check()?;
        self.parker.park(limit, || false);
        Ok(())
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.state.release();
        self.queue.clear();
        self.tickets.finish_all();
        Ok(())
    }

    fn compute_bytes(&mut self, _ops: &[Op<'_, Local, Remote>], _captured: bool) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Error>> {
        None
    }
}
