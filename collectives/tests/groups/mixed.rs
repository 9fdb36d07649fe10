//! A short operation behind a long one of the same rank, measured.

use std::time::Instant;

use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;

use peerlane_hal::Priority;

use crate::support::group::in_group;

const ROUNDS: usize = 60;

/// Returns the time of a call in microseconds.
fn time(call: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let begun = Instant::now();
    call()?;
    Ok(begun.elapsed().as_secs_f64() * 1e6)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns medians: the short operation alone and behind the long one, and the long one alone and
/// with the short one.
fn measure(group: &mut Group, priority: Priority) -> Result<[f64; 4], Error> {
    let mut long = group.all_gather::<u8>(32 << 20).prepare()?;
    let mut short = group.all_reduce::<f32>(8 << 10).priority(priority).prepare()?;
    short.run()?;
    long.run()?;

    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..ROUNDS {
        group.barrier()?;
        times[0].push(time(|| short.run())?);
        group.barrier()?;
        times[2].push(time(|| long.run())?);

        group.barrier()?;
        let begun = Instant::now();
        let started = long.start()?;
        times[1].push(time(|| short.run())?);
        started.wait()?;
        times[3].push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times.map(median))
}

#[test]
#[ignore = "it measures, and a busy machine changes what it measures"]
fn a_short_operation_behind_a_long_one() {
    for priority in [Priority::Normal, Priority::High] {
        for [short, behind, long, with] in in_group(2, |group| measure(group, priority)) {
            println!(
                "all-reduce of 32 KiB, priority {priority:?}: {short:.0} us alone, {behind:.0} us \
                 behind a gather of 32 MiB blocks; the gather: {long:.0} us alone, {with:.0} us \
                 with the all-reduce"
            );
        }
    }
}
