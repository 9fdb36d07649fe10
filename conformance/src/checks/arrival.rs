//! Checks contract 3: arrival.

use std::sync::atomic::Ordering;

use peerlane_hal::CopyEngine;

use crate::data::{aligned, pattern, seed};
use crate::engine::{OpOf, TestEngine, put, signal, word};
use crate::failure::{Outcome, ensure_bytes};
use crate::harness::Harness;
use crate::ranks::{Participant, Window, on_each};

const ROUNDS: u64 = 12;
/// Word that announces the bytes at a reader. At the writer, word `r` says that reader `r` is
/// ready.
const ARRIVED: u64 = 0;

/// Sends large puts from rank 0 to readers that only wait. The readers check the last bytes first,
/// right after they see the flag: the host in even rounds, their engines in odd rounds. This
/// exposes weakly ordered stores and device caches.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn no_flag_is_seen_before_the_flush_of_the_bytes_it_announces<H: Harness>(
    harness: &H,
) -> Outcome {
    on_each(harness, [2, 3], |me| {
        let longest = aligned(&me.caps, (1 << 19) + ROUNDS);
        let buffers = Buffers {
            data: me.bytes(longest)?,
            copy: me.bytes(longest)?,
            flags: me.flags(me.ranks as u64)?,
        };
        let mut engine = me.engine()?;
        for round in 1..=ROUNDS {
            let bytes = aligned(&me.caps, (1 << 19) + round);
            let done = match me.me {
                0 => buffers.send(me, &mut engine, round, bytes),
                _ => buffers.receive(me, &mut engine, round, bytes),
            };
            done.map_err(|failure| failure.within(format!("round {round}")))?;
        }
        me.barrier()
    })
}

/// The memory of this check.
struct Buffers<H: Harness> {
    /// Source on rank 0, destination on the other ranks.
    data: Window<H>,
    /// Destination of the copy with which a reader's engine reads `data`.
    copy: Window<H>,
    flags: Window<H>,
}

impl<H: Harness> Buffers<H> {
    fn send<'r>(
        &'r self,
        me: &Participant<'_, H>,
        engine: &mut TestEngine<'r, '_, H>,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        me.write(&self.data.local, 0, &pattern(seed(0, round), bytes));
        for reader in 1..me.ranks {
            let ready = engine.wait_op(&self.flags.local, reader as u64, round)?;
            let mut ops: Vec<OpOf<'_, H>> = ready.into_iter().collect();
            ops.push(put((&self.data.remote[reader], 0), (&self.data.local, 0), bytes));
            ops.push(signal(&self.flags.remote[reader], ARRIVED, round));
            engine.submit_all(&ops)?;
        }
        engine.run(&[])
    }

    fn receive<'r>(
        &'r self,
        me: &Participant<'_, H>,
        engine: &mut TestEngine<'r, '_, H>,
        round: u64,
        bytes: u64,
    ) -> Outcome {
        me.poison(&self.data.local, 0..bytes);
        let expected = pattern(seed(0, round), bytes);
        engine.run(&[signal(&self.flags.remote[0], me.me as u64, round)])?;
        let flag = word(&self.flags.local, ARRIVED).filter(|_| round.is_multiple_of(2));
        let Some(flag) = flag else {
            let arrived = engine.wait_op(&self.flags.local, ARRIVED, round)?;
            let mut ops: Vec<OpOf<'_, H>> = arrived.into_iter().collect();
            ops.push(put((&self.copy.remote[me.me], 0), (&self.data.local, 0), bytes));
            engine.run(&ops)?;
            return me.ensure_bytes("bytes that the engine saw", &self.copy.local, 0, &expected);
        };
        let time_limit = me.time_limit("the flag that announces the bytes");
        while flag.load(Ordering::Acquire) < round {
            engine.inner.completed()?;
            time_limit.check(|| "the flag is not yet set".to_owned())?;
        }
        let half = bytes / 2;
        let tail = me.read(&self.data.local, half, bytes - half);
        let head = me.read(&self.data.local, 0, half);
        ensure_bytes("second half of the bytes that the host saw", &tail, &expected[head.len()..])?;
        ensure_bytes("first half of the bytes that the host saw", &head, &expected[..head.len()])
    }
}
