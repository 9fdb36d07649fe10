//! Starts all-to-alls with counts of their own in memory of devices: at once and on a stream. The
//! host cannot read the counts there, so they go through the hub.

use peerlane_collectives::group::{AllToAllV, MemoryRange, SendCounts};
use peerlane_hal::ErrorKind;
use peerlane_tests::Outcome;

use super::Case;
use crate::support::data::{block, check, same, unexpected};
use crate::support::test_rank::TestRank;

/// More elements than a rank sends in all, with room for displacements.
const SEND_MAX: usize = 40_000;
const STARTS: usize = 12;

pub(crate) fn cases() -> Vec<Case> {
    let starts = [1, 2].into_iter().flat_map(|outputs| {
        [false, true].map(|on_stream| {
            let place = if on_stream { "on a stream" } else { "at once" };
            let name = format!("counts of each start {place}, {outputs} outputs");
            Case::new(name, move |test_rank| run(test_rank, outputs, on_stream))
        })
    });
    starts.chain([Case::new("counts that one rank refuses", refused)]).collect()
}

fn prepare(test_rank: &mut TestRank, outputs: u32) -> Outcome<AllToAllV<u8>> {
    let ranks = test_rank.ranks;
    let builder = test_rank.group.all_to_all_v::<u8>(SEND_MAX, SEND_MAX * ranks);
    builder.outputs(outputs).prepare().map_err(unexpected)
}

/// Sends random parts of the input of each rank, and checks what comes.
fn run(test_rank: &mut TestRank, outputs: u32, on_stream: bool) -> Outcome {
    let (me, ranks) = (test_rank.me, test_rank.ranks);
    let mut exchange = prepare(test_rank, outputs)?;
    let rng = &mut fastrand::Rng::with_seed(ranks as u64);
    let pinned = test_rank.gpu.pinned(SEND_MAX)?;
    let received = test_rank.gpu.pinned(SEND_MAX * ranks)?;

    for _ in 0..STARTS {
        let round = test_rank.next_round();
        // The blocks are at the ends of equal parts of the input.
        let part = SEND_MAX / ranks;
        let counts: Vec<Vec<usize>> =
            (0..ranks).map(|_| (0..ranks).map(|_| rng.usize(..=part)).collect()).collect();
        let begin = |from: usize, to: usize| (to + 1) * part - counts[from][to];
        let displacements: Vec<usize> = (0..ranks).map(|to| begin(me, to)).collect();
        let counts_of_start = SendCounts::new(&counts[me]).displacements(&displacements);

        let stream = &test_rank.stream;
        let input = exchange.input_memory().map_err(unexpected)?;
        pinned.write(0, &block(me, round, SEND_MAX));
        stream.copy_in(address(input), &pinned, 0, SEND_MAX)?;
        let output = if on_stream {
            let stream = stream.for_starts();
            exchange.start_on(&stream, counts_of_start).map_err(unexpected)?.output()
        } else {
            stream.finish()?;
            exchange.run(counts_of_start).map_err(unexpected)?;
            exchange.output_memory()
        };

        let expected: Vec<u8> = (0..ranks)
            .flat_map(|from| {
                let begin = begin(from, me);
                block(from, round, SEND_MAX)[begin..begin + counts[from][me]].to_vec()
            })
            .collect();
        stream.copy_out(&received, 0, address(output), expected.len())?;
        stream.finish()?;
        same(format!("round {round}"), &received.read(0, output.bytes as usize), &expected)?;
    }
    Ok(())
}

/// One rank gives counts that it must not give, and all ranks return an error.
fn refused(test_rank: &mut TestRank) -> Outcome {
    let (me, ranks) = (test_rank.me, test_rank.ranks);
    let mut exchange = prepare(test_rank, 1)?;
    let guilty = ranks - 1;
    let mut counts = vec![1; ranks];
    if me == guilty {
        counts[0] = SEND_MAX + 1;
    }

    let stream = test_rank.stream.for_starts();
    let at_once = exchange.run(&counts).err();
    let on_stream = exchange.start_on(&stream, &counts).err();
    let errors: Vec<_> = [at_once, on_stream].into_iter().flatten().collect();
    check(errors.len() == 2, || format!("{} starts were refused, expected 2", errors.len()))?;
    for error in errors {
        let expected = if me == guilty { ErrorKind::InvalidArgument } else { ErrorKind::Aborted };
        check(error.kind() == expected, || format!("{error} ({})", error.kind()))?;
        check(error.to_string().contains("40001 elements"), || error.to_string())?;
    }

    counts[0] = 1;
    let came = exchange.run(&counts).map_err(unexpected)?;
    check(*came == vec![1; ranks], || format!("{came:?}"))
}

fn address(memory: MemoryRange) -> u64 {
    memory.base.as_ptr() as u64
}
