//! Runs operations over one window on streams: overlapping ranges must be accessed in stream order.

use peerlane_collectives::error::Error;
use peerlane_tests::middleware::Stream;

use crate::support::{BLOCK_BYTES, Gate, LONG, Rounds, in_group};

const RANKS: usize = 3;
const ROUNDS: u64 = 30;

#[test]
fn overlapping_ranges_come_in_the_order_of_the_stream() {
    let results = in_group(RANKS, LONG, |mut group| {
        let me = group.rank().index();
        let window = group.window::<u8>(RANKS * BLOCK_BYTES + 50)?;
        let mut gathers = Vec::new();
        for begin in [0, 50, 17] {
            let builder = group.all_gather(BLOCK_BYTES).output_into(&window, begin);
            gathers.push(builder.in_place().prepare()?);
        }
        let (stream, rounds) = (Stream::new(), Rounds::default());
        for round in 0..ROUNDS {
            let gather = &mut gathers[round as usize % 3];
            rounds.fill(&stream, me, gather.input_memory().unwrap());
            let lease = gather.start_on(&stream)?;
            rounds.look(&stream, RANKS, lease.output());
        }
        assert!(stream.is_idle_within(LONG));
        assert_eq!(rounds.right(), ROUNDS, "rank {me}");
        group.barrier()?;
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn the_host_keeps_away_until_it_has_waited() {
    let results = in_group(2, LONG, |mut group| {
        let window = group.window::<u8>(2 * BLOCK_BYTES)?;
        let mut gather =
            group.all_gather(BLOCK_BYTES).output_into(&window, 0).in_place().prepare()?;
        let (stream, gate) = (Stream::new(), Gate::default());
        gate.hold(&stream);
        let mut lease = gather.start_on(&stream)?;
        let error = window.slice(0..1).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "bytes 0 to {} of window 1 are in use: all-gather 1 uses them in a start that \
                 this rank has not waited for; wait for it first",
                2 * BLOCK_BYTES
            )
        );
        gate.open();
        lease.wait()?;
        drop(lease);
        drop(window.slice(0..1)?);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}
