//! Measures the bandwidth of many messages in flight, and the latency of signals that go back and
//! forth.

use std::time::{Duration, Instant};

use super::options::PerfTest;
use super::pair::{Channels, Pair};
use super::report::{Latency, PerfRow, Throughput};
use crate::error::Result;

/// Measures the bandwidth of one message size; only rank 0 returns a result row. Collective.
pub(super) fn measure_rate(
    pair: &mut Pair<'_>,
    work: PerfTest,
    bytes: u64,
) -> Result<Option<PerfRow>> {
    let mut channels = pair.channels(bytes)?;
    let mut row = None;
    if pair.is_measuring() {
        run(pair, &mut channels, work, pair.options.warmup)?;
        let elapsed = run(pair, &mut channels, work, pair.options.iterations)?;
        let messages = u64::from(pair.options.iterations) * channels.all.len() as u64;
        let rate = Throughput::new(messages, bytes, elapsed);
        row = Some(PerfRow { rate: Some(rate), ..pair.row(work, bytes) });
        // The completion of a put does not mean that the peer can see it; a signal does.
        for index in 0..channels.all.len() {
            channels.signal_done(index, pair.deadline())?;
        }
    } else {
        for index in 0..channels.all.len() {
            channels.wait(index, pair.deadline())?;
        }
    }
    pair.finish(channels, work)?;
    Ok(row)
}

/// Moves `count` messages on each channel and returns the elapsed time.
fn run(pair: &Pair<'_>, channels: &mut Channels, work: PerfTest, count: u32) -> Result<Duration> {
    let (window, deadline) = (pair.options.window as usize, pair.deadline());
    let mut left = vec![count as usize; channels.all.len()];
    let started_at = Instant::now();

    loop {
        let (mut has_sent, mut in_flight_on) = (false, None);
        for (index, left) in left.iter_mut().enumerate() {
            let in_flight = channels.all[index].unfinished()?;
            let next = window.saturating_sub(in_flight).min(*left);
            for _ in 0..next {
                channels.send(index, work)?;
            }
            *left -= next;
            has_sent |= next > 0;
            if in_flight > 0 {
                in_flight_on.get_or_insert((index, in_flight));
            }
        }

        // Without a message to send, one in flight must end before there is a place in the window.
        match in_flight_on {
            _ if has_sent => {}
            None => return Ok(started_at.elapsed()),
            Some((index, in_flight)) => {
                channels.all[index].wait_unfinished(in_flight - 1, deadline.remaining())?;
            }
        }
    }
}

/// Measures the latency of one message size; only rank 0 returns a result row. Collective.
pub(super) fn measure_latency(pair: &mut Pair<'_>, bytes: u64) -> Result<Option<PerfRow>> {
    let mut channels = pair.channels(bytes)?;
    let (warmup, timed) = (u64::from(pair.options.warmup), u64::from(pair.options.iterations));
    let is_measuring = pair.is_measuring();
    let mut times: Vec<Duration> = Vec::with_capacity(timed as usize);

    for round in 0..warmup + timed {
        let (deadline, started_at) = (pair.deadline(), Instant::now());
        if is_measuring {
            channels.send(0, PerfTest::Signal)?;
            channels.wait(0, deadline)?;
        } else {
            channels.wait(0, deadline)?;
            channels.send(0, PerfTest::Signal)?;
        }
        if round >= warmup {
            times.push(started_at.elapsed() / 2);
        }
    }

    channels.all[0].flush(pair.deadline().remaining())?;
    pair.finish(channels, PerfTest::Signal)?;
    let row = |latency| PerfRow { latency: Some(latency), ..pair.row(PerfTest::Signal, bytes) };
    Ok(is_measuring.then(|| row(Latency::of_times(times))))
}
