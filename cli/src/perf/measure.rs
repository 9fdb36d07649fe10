//! Measures the bandwidth of many messages in flight, and the latency of signals that go back and forth.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use peerlane::hal::Ticket;

use super::options::PerfTest;
use super::pair::{Buffers, Pair};
use super::report::{Latency, PerfRow, Throughput};
use crate::error::{Failure, Result};

/// The maximum time to park on one engine while other engines have messages in flight.
const PARK_MAX: Duration = Duration::from_micros(50);

/// The progress of the messages that one engine has submitted.
#[derive(Debug, Default)]
struct EngineProgress {
    submitted: u32,
    completed: u32,
    /// The submitted slices that are not complete, each with its number of messages.
    open: VecDeque<(Ticket, u32)>,
}

/// Measures the bandwidth of one message size; only rank 0 returns a result row. Collective.
pub(super) fn measure_rate(
    pair: &mut Pair<'_>,
    work: PerfTest,
    bytes: u64,
) -> Result<Option<PerfRow>> {
    let buffers = pair.buffers(bytes)?;
    let done_value = pair.values(1);
    let mut row = None;
    if pair.is_measuring() {
        run(pair, &buffers, work, pair.options.warmup)?;
        let elapsed = run(pair, &buffers, work, pair.options.iterations)?;
        let messages = u64::from(pair.options.iterations) * pair.engines.len() as u64;
        let rate = Throughput::new(messages, bytes, elapsed);
        row = Some(PerfRow { rate: Some(rate), ..pair.row(work, bytes) });
        // The completion of a put does not mean that the peer can see it; a signal does.
        for engine in 0..pair.engines.len() {
            pair.signal_done(engine, done_value)?;
        }
    } else {
        for engine in 0..pair.engines.len() {
            pair.wait(engine, done_value)?;
        }
    }
    pair.finish(buffers, work)?;
    Ok(row)
}

/// Moves `count` messages on each engine and returns the elapsed time.
fn run(pair: &mut Pair<'_>, buffers: &Buffers, work: PerfTest, count: u32) -> Result<Duration> {
    let window = pair.options.window;
    let (deadline, timeout) = (pair.deadline(), pair.options.run.timeout);
    let several = pair.engines.len() > 1;
    let mut senders: Vec<_> = pair
        .engines
        .iter_mut()
        .enumerate()
        .map(|(index, engine)| {
            let slice = (window as usize / 4).clamp(1, engine.slice_ops_max());
            (engine, vec![buffers.message(work, index); slice], EngineProgress::default())
        })
        .collect();
    let started_at = Instant::now();
    loop {
        let mut has_progress = false;
        for (engine, slice, progress) in &mut senders {
            has_progress |= progress.count_completed(engine.completed()?);
            let next = (count - progress.submitted).min(slice.len() as u32);
            if next > 0 && window - (progress.submitted - progress.completed) >= next {
                // SAFETY: the buffers outlive the last completion, or are leaked. The peer touches them
                // only after the signal.
                let ticket = unsafe { engine.submit(&slice[..next as usize]) }?;
                progress.submitted += next;
                progress.open.push_back((ticket, next));
                has_progress = true;
            }
        }
        let Some((engine, ..)) =
            senders.iter_mut().find(|(.., progress)| progress.completed < count)
        else {
            return Ok(started_at.elapsed());
        };
        if has_progress {
            continue;
        }
        if deadline.has_passed() {
            let what = work.name();
            let text =
                format!("the {what}s of one message size did not complete within {timeout:?}");
            return Err(Failure::failed(text)
                .with_advice("check that both ranks run, raise --timeout, or lower --iterations"));
        }
        engine.park(if several { PARK_MAX } else { deadline.remaining() })?;
    }
}

impl EngineProgress {
    /// Counts the messages up to a completed ticket, and returns whether there are new ones.
    fn count_completed(&mut self, completed: Ticket) -> bool {
        let before = self.completed;
        while let Some((ticket, messages)) = self.open.front().copied() {
            if ticket > completed {
                break;
            }
            self.open.pop_front();
            self.completed += messages;
        }
        self.completed > before
    }
}

/// Measures the latency of one message size; only rank 0 returns a result row. Collective.
pub(super) fn measure_latency(pair: &mut Pair<'_>, bytes: u64) -> Result<Option<PerfRow>> {
    let buffers = pair.buffers(bytes)?;
    let (warmup, timed) = (u64::from(pair.options.warmup), u64::from(pair.options.iterations));
    let first = pair.values(warmup + timed);
    let is_measuring = pair.is_measuring();
    let mut times: Vec<Duration> = Vec::with_capacity(timed as usize);
    for round in 0..warmup + timed {
        let value = first + round;
        let started_at = Instant::now();
        if is_measuring {
            pair.send(&buffers, value)?;
            pair.wait(0, value)?;
        } else {
            pair.wait(0, value)?;
            pair.send(&buffers, value)?;
        }
        if round >= warmup {
            times.push(started_at.elapsed() / 2);
        }
    }
    pair.wait_sent()?;
    pair.finish(buffers, PerfTest::Signal)?;
    let row = |latency| PerfRow { latency: Some(latency), ..pair.row(PerfTest::Signal, bytes) };
    Ok(is_measuring.then(|| row(Latency::of(times))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_complete_with_their_slice() {
        let mut progress = EngineProgress { submitted: 7, completed: 0, open: VecDeque::new() };
        progress.open.extend([(Ticket(3), 4), (Ticket(4), 3)]);
        assert!(!progress.count_completed(Ticket(2)));
        assert!(progress.count_completed(Ticket(3)));
        assert_eq!((progress.completed, progress.open.len()), (4, 1));
        assert!(progress.count_completed(Ticket(9)) && progress.completed == 7);
    }
}
