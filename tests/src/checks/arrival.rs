//! Contract 3: arrival.

use std::sync::atomic::Ordering;

use peerlane_hal::CopyEngine;

use crate::data::{aligned, pattern, seed};
use crate::driver::{Driver, OpOf, put, signal, word};
use crate::failure::{Outcome, ensure_bytes};
use crate::harness::Harness;
use crate::world::{Participant, Window, on_each};

const ROUNDS: u64 = 12;
/// Words at a reader and, from the reader's rank on, at the writer.
const ARRIVED: u64 = 0;

/// Rank 0 sends large puts to readers that do nothing but wait. They look at the last bytes first,
/// the moment the flag is seen: in even rounds by the host, in odd ones by their engines. Weakly
/// ordered stores and device caches show here.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn no_flag_is_seen_before_the_flush_of_the_bytes_it_announces<H: Harness>(
    harness: &H,
) -> Outcome {
    on_each(harness, [2, 3], |me| {
        let longest = aligned(&me.caps, (1 << 19) + ROUNDS);
        let stage = Stage {
            data: me.bytes(longest)?,
            copy: me.bytes(longest)?,
            flags: me.flags(me.ranks as u64)?,
        };
        let mut driver = me.engine()?;
        for round in 1..=ROUNDS {
            let bytes = aligned(&me.caps, (1 << 19) + round);
            let done = match me.me {
                0 => stage.send(me, &mut driver, round, bytes),
                _ => stage.receive(me, &mut driver, round, bytes),
            };
            done.map_err(|failure| failure.within(format!("round {round}")))?;
        }
        me.meet()
    })
}

struct Stage<H: Harness> {
    /// The source of rank 0, and where it lands on the others.
    data: Window<H>,
    /// For the engine's look.
    copy: Window<H>,
    flags: Window<H>,
}

impl<H: Harness> Stage<H> {
    fn send<'r>(
        &'r self,
        me: &Participant<'_, H>,
        driver: &mut Driver<'r, '_, H>,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        me.write(&self.data.local, 0, &pattern(seed(0, round), bytes));
        for reader in 1..me.ranks {
            let ready = driver.hold(&self.flags.local, reader as u64, round)?;
            let mut ops: Vec<OpOf<'_, H>> = ready.into_iter().collect();
            ops.push(put((&self.data.remote[reader], 0), (&self.data.local, 0), bytes));
            ops.push(signal(&self.flags.remote[reader], ARRIVED, round));
            driver.submit_all(&ops)?;
        }
        driver.run(&[])
    }

    fn receive<'r>(
        &'r self,
        me: &Participant<'_, H>,
        driver: &mut Driver<'r, '_, H>,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        me.poison(&self.data.local, 0..bytes);
        let wanted = pattern(seed(0, round), bytes);
        driver.run(&[signal(&self.flags.remote[0], me.me as u64, round)])?;
        let flag = word(&self.flags.local, ARRIVED).filter(|_| round.is_multiple_of(2));
        let Some(flag) = flag else {
            let arrived = driver.hold(&self.flags.local, ARRIVED, round)?;
            let mut ops: Vec<OpOf<'_, H>> = arrived.into_iter().collect();
            ops.push(put((&self.copy.remote[me.me], 0), (&self.data.local, 0), bytes));
            driver.run(&ops)?;
            return me.ensure_bytes("what the engine saw", &self.copy.local, 0, &wanted);
        };
        let patience = me.patience("the bytes to arrive");
        while flag.load(Ordering::Acquire) < round {
            driver.engine.completed()?;
            patience.check(|| "no flag".to_owned())?;
        }
        let half = bytes / 2;
        let tail = me.read(&self.data.local, half, bytes - half);
        let head = me.read(&self.data.local, 0, half);
        ensure_bytes("the end, as the host saw it", &tail, &wanted[head.len()..])?;
        ensure_bytes("the start, as the host saw it", &head, &wanted[..head.len()])
    }
}
