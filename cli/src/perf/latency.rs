//! How long a put with a signal behind it takes from rank to rank.

use std::time::{Duration, Instant};

use peerlane::hal::Fabric;

use super::options::Work;
use super::pair::Pair;
use super::row::{Latency, Row};
use crate::error::Result;

/// Measures one size; the row is rank 0's. Collective.
///
/// # Errors
/// If an answer is missing, or a byte is wrong.
pub(super) fn measure<F: Fabric>(pair: &mut Pair<'_, F>, bytes: u64) -> Result<Option<Row>> {
    let buffers = pair.buffers(bytes)?;
    let (warmup, timed) = (u64::from(pair.options.warmup), u64::from(pair.options.iterations));
    let first = pair.values(warmup + timed);
    let measures = pair.measures();
    let mut times: Vec<Duration> = Vec::with_capacity(timed as usize);
    for round in 0..warmup + timed {
        let value = first + round;
        let begun = Instant::now();
        if measures {
            pair.send(&buffers, value)?;
            pair.wait(0, value)?;
        } else {
            pair.wait(0, value)?;
            pair.send(&buffers, value)?;
        }
        if round >= warmup {
            times.push(begun.elapsed() / 2);
        }
    }
    pair.settle()?;
    pair.finish(buffers, Work::Signal)?;
    let row = |latency| Row { latency: Some(latency), ..pair.row(Work::Signal, bytes) };
    Ok(measures.then(|| row(Latency::of(times))))
}
