//! Checks contract 5: all or nothing.

use peerlane_hal::{Error, ErrorKind, Ticket};

use crate::data::{POISON, aligned, pattern, seed};
use crate::engine::{OpOf, TestEngine, put, signal, wait};
use crate::failure::{Outcome, ensure, ensure_all, ensure_bytes};
use crate::harness::Harness;
use crate::ranks::{Participant, Window, on_ranks};

/// Bounds the attempts to fill a queue: a queue that takes this many slots counts as unbounded.
const SLOTS_MAX: usize = 1 << 14;

/// Holds one block for each slot, so that the data shows which ops ran.
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

    /// Submits slices of `ops` puts behind a blocked wait until one is refused. Returns how many
    /// slots were taken, and the ops of the refused slice.
    fn fill<'r>(
        &'r self,
        engine: &mut TestEngine<'r, '_, H>,
        ops: usize,
        round: u64,
    ) -> Outcome<(usize, Vec<OpOf<'r, H>>)> {
        let mut last: Option<Ticket> = None;
        if engine.caps().queued_wait {
            last = Some(engine.submit_now(&[wait(&self.flags.local, 0, round)])?);
        }
        let mut taken = 0;
        while taken + ops <= SLOTS_MAX {
            let slice: Vec<_> = (taken..taken + ops).map(|slot| self.op(slot)).collect();
            match engine.try_submit(&slice) {
                Ok(ticket) => {
                    let gap = last.is_some_and(|last| ticket.0 != last.0 + 1);
                    ensure!(
                        !gap,
                        "a slice got ticket {}, expected the number after the previous ticket, \
                         {last:?}",
                        ticket.0
                    );
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

/// Fills the queue behind a blocked wait with slices of several lengths. The refused slice must not
/// write a byte, and must be taken later.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_full_queue_takes_nothing_of_a_slice<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let slots = Slots::open(me)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        let limit = engine.caps().slice_ops_max;
        for (round, ops) in
            (1..).zip([1, 2, 3, 4, 7, 16, 64].into_iter().filter(|&ops| ops <= limit))
        {
            let (taken, refused) = slots.fill(&mut engine, ops, round)?;
            opener.run(&[signal(&slots.flags.remote[0], 0, round)])?;
            let drained = engine.submit(&[])?;
            engine.finish(drained)?;
            let bytes = SLOTS_MAX as u64 * slots.block;
            let seen = me.read(&slots.landing.local, 0, bytes);
            let expected = pattern(seed(0, 0), bytes);
            let end = taken * usize::try_from(slots.block).expect("a small block");
            let name = |what: &str| format!("{what}, with slices of {ops} ops");
            ensure_bytes(
                name("destination of slices that were accepted"),
                &seen[..end],
                &expected[..end],
            )?;
            ensure_all(name("destination of the slice that was refused"), &seen[end..], POISON)?;
            engine.run(&refused)?;
            let end = end + refused.len() * usize::try_from(slots.block).expect("a small block");
            let seen = me.read(&slots.landing.local, 0, end as u64);
            ensure_bytes(
                name("destination after the refused slice was submitted again"),
                &seen,
                &expected[..end],
            )?;
            me.poison(&slots.landing.local, 0..bytes);
        }
        Ok(())
    })
}

/// Submits slices of every length up to the limit when everything earlier has completed, also after
/// the queue was full. The first attempt must be taken.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_slice_within_the_limit_fits_an_empty_queue<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let slots = Slots::open(me)?;
        let (mut engine, mut opener) = (me.engine()?, me.engine()?);
        let longest = engine.caps().slice_ops_max.min(SLOTS_MAX);
        let all: Vec<_> = (0..longest).map(|slot| slots.op(slot)).collect();
        for round in 1..=3 {
            for ops in (1..=longest.min(40)).chain([longest / 2 + 1, longest - 1, longest]) {
                let ticket = engine.submit_now(&all[..ops]).map_err(|failure| {
                    failure.within(format!("submit of {ops} ops to an empty queue"))
                })?;
                engine.finish(ticket)?;
            }
            let (_, refused) = slots.fill(&mut engine, longest.min(5), round)?;
            opener.run(&[signal(&slots.flags.remote[0], 0, round)])?;
            engine.run(&refused)?;
        }
        Ok(())
    })
}
