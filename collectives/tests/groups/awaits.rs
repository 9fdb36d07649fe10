//! An awaited start beside a start that blocks, measured.

use std::time::Instant;

use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;

use crate::support::group::in_group;
use crate::waiting::block_on;

const ROUNDS: usize = 200;
const BYTES: [usize; 6] = [4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20];

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the median times in microseconds of starts of a size that block, and that are awaited.
fn measure(group: &mut Group, bytes: usize) -> Result<[f64; 2], Error> {
    let mut gather = group.all_gather::<u8>(bytes / group.ranks()).prepare()?;
    let mut times: [Vec<f64>; 2] = Default::default();
    for _ in 0..ROUNDS.min(8 * ROUNDS * (64 << 10) / bytes).max(20) {
        gather.run()?;
        let begun = Instant::now();
        gather.run()?;
        times[0].push(begun.elapsed().as_secs_f64() * 1e6);

        block_on(gather.start()?)?;
        let begun = Instant::now();
        block_on(gather.start()?)?;
        times[1].push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times.map(median))
}

#[test]
#[ignore = "it measures, and a busy machine changes what it measures"]
fn an_awaited_start_beside_one_that_blocks() {
    for ranks in [2, 4] {
        for bytes in BYTES {
            let [run, awaited] = in_group(ranks, |group| measure(group, bytes))[0];
            let times = awaited / run;
            println!(
                "{ranks} ranks, {bytes} B: run {run:.1} us, await {awaited:.1} us: {times:.2}"
            );
        }
    }
}
