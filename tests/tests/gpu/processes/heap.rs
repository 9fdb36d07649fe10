//! Prepares, starts and drops operations over the heap in random sequences.
//!
//! All ranks make the same calls, but each drops the handles of operations that all have given up when it likes.

use peerlane_collectives::group::Operation;
use peerlane_collectives::plan::Algorithm;
use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::unexpected;
use crate::support::test_rank::TestRank;

const SEQUENCES: u64 = 32;
const STEPS: u32 = 12;
/// Those of groups of more than four ranks, which take as long as all others together.
const SEQUENCES_LARGE: u64 = 8;
/// Large enough that the heap grows.
const BYTES_MAX: usize = 400_000;

pub(crate) fn cases(ranks: usize) -> Vec<Case> {
    let sequences = if ranks > 4 { SEQUENCES_LARGE } else { SEQUENCES };
    let sequence =
        |seed| Case::new(format_args!("sequence {seed}"), move |test_rank| run(test_rank, seed));
    (0..sequences).map(sequence).collect()
}

fn run(test_rank: &mut TestRank, seed: u64) -> Outcome {
    let random = &mut fastrand::Rng::with_seed(seed);
    let mut live: Vec<Operation<u8>> = Vec::new();
    let mut given_up = Vec::new();
    for _ in 0..STEPS {
        match random.u8(..4) {
            0 => live.push(prepare(test_rank, random)?),
            1 if !live.is_empty() => given_up.push(live.swap_remove(random.usize(..live.len()))),
            _ if live.is_empty() => live.push(prepare(test_rank, random)?),
            _ => {
                let index = random.usize(..live.len());
                test_rank.gather_once(&mut live[index])?;
            }
        }
        if !given_up.is_empty() && test_rank.random.bool() {
            given_up.swap_remove(test_rank.random.usize(..given_up.len()));
        }
    }
    Ok(())
}

fn prepare(test_rank: &mut TestRank, random: &mut fastrand::Rng) -> Outcome<Operation<u8>> {
    let most = if random.u8(..4) == 0 { BYTES_MAX } else { 5000 };
    let bytes = random.usize(1..=most);
    let algorithms = [Algorithm::Direct, Algorithm::Pull, Algorithm::Ring];
    let algorithm = *random.choice(&algorithms).unwrap_or(&Algorithm::Direct);
    let gather = test_rank.group.all_gather::<u8>(bytes).algorithm(algorithm);
    let gather = match random.u8(..4) {
        // SAFETY: no graph records the operation.
        0 => unsafe { gather.capturable() },
        1 => gather.resizable(),
        _ => gather,
    };
    gather.prepare().map_err(unexpected)
}
