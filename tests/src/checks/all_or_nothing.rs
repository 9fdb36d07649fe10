//! Contract 5: all or nothing.

use peerlane_hal::{Error, ErrorKind, Ticket};

use crate::data::{POISON, aligned, pattern, seed};
use crate::driver::{Driver, OpOf, put, signal, wait};
use crate::failure::{Outcome, ensure, ensure_all, ensure_bytes};
use crate::harness::Harness;
use crate::world::{Participant, Window, on_ranks};

/// A queue that is not full by then is not filled.
const SLOTS_MAX: usize = 1 << 14;

/// One block a slot, so that each op that ran can be told.
struct Slots<H: Harness> {
    source: Window<H>,
    landing: Window<H>,
    flags: Window<H>,
    block: u64,
}

impl<H: Harness> Slots<H> {
    fn open(me: &mut Participant<'_, H>) -> Outcome<Self> {
        let block = aligned(&me.caps, 8);
        let bytes = SLOTS_MAX as u64 * block;
        let slots = Self {
            source: me.bytes(bytes)?,
            landing: me.bytes(bytes)?,
            flags: me.flags(1)?,
            block,
        };
        me.write(&slots.source.local, 0, &pattern(seed(0, 0), bytes));
        Ok(slots)
    }

    fn op(&self, slot: usize) -> OpOf<'_, H> {
        let at = slot as u64 * self.block;
        put((&self.landing.remote[0], at), (&self.source.local, at), self.block)
    }

    /// Submits slices of `ops` puts behind a blocked wait until one is refused; how many slots were
    /// taken, and the ops of the refused slice.
    fn fill<'r>(
        &'r self,
        driver: &mut Driver<'r, '_, H>,
        ops: usize,
        round: u64,
    ) -> Outcome<(usize, Vec<OpOf<'r, H>>)> {
        let mut last: Option<Ticket> = None;
        if driver.caps().queued_wait {
            last = Some(driver.submit_now(&[wait(&self.flags.local, 0, round)])?);
        }
        let mut taken = 0;
        while taken + ops <= SLOTS_MAX {
            let slice: Vec<_> = (taken..taken + ops).map(|slot| self.op(slot)).collect();
            match driver.try_submit(&slice) {
                Ok(ticket) => {
                    let gap = last.is_some_and(|last| ticket.0 != last.0 + 1);
                    ensure!(!gap, "ticket {} follows {last:?}", ticket.0);
                    last = Some(ticket);
                    taken += ops;
                }
                Err(error) if error.kind() == ErrorKind::QueueFull => return Ok((taken, slice)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok((taken, Vec::new()))
    }
}

/// The queue is filled behind a blocked wait with slices of several lengths. The refused one leaves
/// no byte, and is taken later.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_full_queue_takes_nothing_of_a_slice<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let slots = Slots::open(me)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        let limit = driver.caps().slice_ops_max;
        for (round, ops) in
            (1..).zip([1, 2, 3, 4, 7, 16, 64].into_iter().filter(|&ops| ops <= limit))
        {
            let (taken, refused) = slots.fill(&mut driver, ops, round)?;
            opener.run(&[signal(&slots.flags.remote[0], 0, round)])?;
            let drained = driver.submit(&[])?;
            driver.finish(drained)?;
            let bytes = SLOTS_MAX as u64 * slots.block;
            let seen = me.read(&slots.landing.local, 0, bytes);
            let wanted = pattern(seed(0, 0), bytes);
            let end = taken * usize::try_from(slots.block).expect("a small block");
            let name = |what: &str| format!("{what}, slices of {ops} ops");
            ensure_bytes(name("slots of slices that were taken"), &seen[..end], &wanted[..end])?;
            ensure_all(name("slots of the slice that was refused"), &seen[end..], POISON)?;
            driver.run(&refused)?;
            let end = end + refused.len() * usize::try_from(slots.block).expect("a small block");
            let seen = me.read(&slots.landing.local, 0, end as u64);
            ensure_bytes(name("slots after another try"), &seen, &wanted[..end])?;
            me.poison(&slots.landing.local, 0..bytes);
        }
        Ok(())
    })
}

/// Every length up to the limit is taken at the first try once all before has completed, also when
/// the queue was full before.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_slice_within_the_limit_fits_an_empty_queue<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let slots = Slots::open(me)?;
        let (mut driver, mut opener) = (me.engine()?, me.engine()?);
        let longest = driver.caps().slice_ops_max.min(SLOTS_MAX);
        let all: Vec<_> = (0..longest).map(|slot| slots.op(slot)).collect();
        for round in 1..=3 {
            for ops in (1..=longest.min(40)).chain([longest / 2 + 1, longest - 1, longest]) {
                let ticket = driver
                    .submit_now(&all[..ops])
                    .map_err(|failure| failure.within(format!("{ops} ops, an empty queue")))?;
                driver.finish(ticket)?;
            }
            let (_, refused) = slots.fill(&mut driver, longest.min(5), round)?;
            opener.run(&[signal(&slots.flags.remote[0], 0, round)])?;
            driver.run(&refused)?;
        }
        Ok(())
    })
}
