//! Starts all-to-alls with counts of their own on streams, whose work fills the input and reads the
//! output.

use peerlane_collectives::error::Error;
use peerlane_collectives::group::SendCounts;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::{Stream, StreamLayer};

use crate::support::{Foreign, LONG, Rounds, byte, in_group, in_group_with};

const ROUNDS: u64 = 40;
const SEND_MAX: usize = 300;

/// Draws what each rank sends to each rank, the same on all ranks.
fn counts(rng: &mut fastrand::Rng, ranks: usize) -> Vec<Vec<usize>> {
    let row =
        |rng: &mut fastrand::Rng| (0..ranks).map(|_| rng.usize(..=SEND_MAX / ranks)).collect();
    (0..ranks).map(|_| row(rng)).collect()
}

/// Enqueues rounds with other counts each, without a look of the host in between.
fn rounds(ranks: usize, layer: StreamLayer, outputs: u32) {
    let results = in_group_with(layer, ranks, LONG, |mut group| {
        let me = group.rank().index();
        let builder = group.all_to_all_v::<u8>(SEND_MAX, SEND_MAX * ranks).outputs(outputs);
        let mut exchange = builder.prepare()?;
        let (stream, rounds) = (Stream::new(), Rounds::default());
        let rng = &mut fastrand::Rng::with_seed(ranks as u64);

        for round in 1..=ROUNDS {
            let send = counts(rng, ranks);
            rounds.fill(&stream, me, exchange.input_memory()?);
            let lease = exchange.start_on(&stream, &send[me])?;
            let output = lease.output();
            let expected = (0..ranks).flat_map(|from| vec![byte(from, round); send[from][me]]);
            rounds.look_for(&stream, expected.collect(), output);

            let received: Vec<usize> = (0..ranks).map(|from| send[from][me]).collect();
            assert_eq!(exchange.received_counts(), received);
        }
        assert!(stream.is_idle_within(LONG));
        assert_eq!(rounds.right(), ROUNDS, "rank {me}");
        drop(exchange);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn each_round_has_counts_of_its_own() {
    for ranks in 1..=4 {
        for outputs in [1, 2] {
            rounds(ranks, StreamLayer::default(), outputs);
        }
    }
}

#[test]
fn a_queue_that_is_always_full_gets_counts_of_each_round() {
    rounds(3, StreamLayer { slices_max: 1 }, 1);
}

#[test]
fn starts_of_the_host_and_on_a_stream_can_be_one_start() {
    let results = in_group(3, LONG, |mut group| {
        let me = group.rank().0 as u8;
        let mut exchange = group.all_to_all_v::<u8>(3, 9).outputs(1).prepare()?;
        let stream = Stream::new();
        for round in 0..60 {
            exchange.input_mut()?.fill(me);
            // In some rounds all ranks are on the host, in some on streams, and in others mixed.
            if (round / 3 + me % (1 + round % 3)).is_multiple_of(3) {
                exchange.start_on(&stream, &[1, 1, 1])?.wait()?;
            } else {
                exchange.run(&[1, 1, 1])?;
            }
            assert_eq!(exchange.output()?, [0, 1, 2]);
        }
        drop(exchange);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

/// One rank cannot make the start, and all ranks return an error at once.
#[test]
fn a_stream_or_counts_that_one_rank_refuses_are_an_error_on_all_ranks() {
    in_group(3, LONG, |mut group| {
        let me = group.rank();
        let mut exchange = group.all_to_all_v::<u8>(3, 9).prepare().unwrap();
        let stream = Stream::new();

        let foreign = match me {
            Rank(1) => exchange.start_on(&Foreign, &[1, 1, 1]).unwrap_err(),
            _ => exchange.start_on(&stream, &[1, 1, 1]).unwrap_err(),
        };
        let expected = if me == Rank(1) { ErrorKind::Mismatch } else { ErrorKind::Aborted };
        assert_eq!(foreign.kind(), expected, "{foreign}");

        if me == Rank(2) {
            stream.begin_capture();
        }
        let capturing = exchange.start_on(&stream, &[1, 1, 1]).unwrap_err();
        if me == Rank(2) {
            assert!(stream.end_capture().is_empty());
        }
        let refused = match me {
            Rank(2) => "the stream captures a graph",
            _ => "rank 2 failed (invalid argument): the stream captures a graph",
        };
        assert!(capturing.to_string().contains(refused), "{capturing}");

        let send = if me == Rank(0) { [2, 2, 0] } else { [1, 1, 1] };
        let counts = SendCounts::new(&send);
        let error = exchange.start_on(&stream, counts).unwrap_err();
        assert!(error.to_string().contains("2 elements are sent to rank 1"), "{error}");

        exchange.start_on(&stream, &[1, 1, 1]).unwrap().wait().unwrap();
        drop(exchange);
        group.close().unwrap();
    });
}
