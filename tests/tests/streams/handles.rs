//! Starts beside streams, whose blocks arrive and depart one after the other.

use std::time::Duration;

use insta::assert_snapshot;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::OperationBuilder;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::{Stream, StreamLayer};

use crate::support::{
    BLOCK_BYTES, Foreign, Gate, LONG, Rounds, SHORT, assert_idle_within, await_end, byte, in_group,
    in_group_with, pause,
};

const ROUNDS: u64 = 20;

type Builder<'g> = OperationBuilder<'g, u8>;

/// Rounds in which two streams read blocks by turns, and one is slow on some ranks. The host never
/// waits, so only the handles keep the next round away from readers.
fn gathers(ranks: usize, layer: StreamLayer, describe: impl Fn(Builder<'_>) -> Builder<'_> + Sync) {
    let results = in_group_with(layer, ranks, LONG, |mut group| {
        let me = group.rank();
        let mut gather = describe(group.all_gather(BLOCK_BYTES)).arrivals().prepare()?;
        let mut order: Vec<Rank> = gather.arrivals().iter().map(|chunk| chunk.block).collect();
        assert_eq!(order.len(), ranks);
        // In place, peers still get what a reader of the own block would spoil.
        let in_place = order[0] == me && ranks > 1;
        order.retain(|&block| block != me || !in_place);
        let (stream, other, rounds) = (Stream::new(), Stream::new(), Rounds::default());
        for round in 1..=ROUNDS {
            rounds.fill(&stream, me.index(), gather.input_memory().unwrap());
            let mut started = gather.start_beside(&stream)?;
            assert_eq!(started.epoch(), Some(round));
            for (number, &block) in order.iter().enumerate() {
                let reader = if number % 2 == 0 { &stream } else { &other };
                started.wait_on(block, reader)?;
                if round % 5 == me.0.into() {
                    pause(reader, Duration::from_millis(2));
                }
                let expected = vec![byte(block.index(), round); BLOCK_BYTES];
                rounds.look_for(reader, expected, started.output_of(block)?);
            }
            match round % 2 {
                0 => started.finish()?,
                _ => drop(started),
            }
        }
        assert!(stream.is_idle_within(LONG) && other.is_idle_within(LONG));
        assert_eq!(rounds.right(), ROUNDS * order.len() as u64, "rank {me}");
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn streams_read_each_block_when_it_arrives() {
    for ranks in 1..=5 {
        gathers(ranks, StreamLayer::default(), |builder| builder.outputs(1));
    }
    gathers(3, StreamLayer::default(), |builder| builder.outputs(2));
    gathers(3, StreamLayer::default(), |builder| builder.in_place());
    gathers(3, StreamLayer { slices_max: 1 }, |builder| builder.outputs(1));
}

/// The stream goes on with the first block while another one cannot arrive.
#[test]
fn a_stream_goes_on_with_what_has_arrived() {
    let (held, read) = (Gate::default(), Gate::default());
    let results = in_group(3, LONG, |mut group| {
        let me = group.rank();
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).outputs(2).arrivals().prepare()?;
        let (stream, rounds) = (Stream::new(), Rounds::default());
        rounds.fill(&stream, me.index(), gather.input_memory().unwrap());
        if me == Rank(1) {
            held.hold(&stream);
        }
        let mut started = gather.start_beside(&stream)?;
        if me == Rank(0) {
            started.wait_on(Rank(2), &stream)?;
            rounds.look_for(&stream, vec![byte(2, 1); BLOCK_BYTES], started.output_of(Rank(2))?);
            let read = read.clone();
            stream.run(move || read.open());
            assert!(!started.wait_for_block(Rank(1), Duration::ZERO)?);
        }
        if me == Rank(2) {
            read.wait();
            held.open();
        }
        started.finish()?;
        assert!(stream.is_idle_within(LONG));
        assert_eq!(rounds.right(), u64::from(me == Rank(0)));
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

/// Each block of an all-to-all departs behind the work that fills it, and arrives by itself.
fn exchanges(ranks: usize, captured: bool) {
    let results = in_group(ranks, LONG, |mut group| {
        let me = group.rank();
        let builder = group.all_to_all::<u8>(BLOCK_BYTES).arrivals().departures();
        // SAFETY: the stream is idle before the operation is dropped, and the host borrows nothing.
        let builder = if captured { unsafe { builder.capturable() } } else { builder };
        let mut exchange = builder.prepare()?;
        let departures = exchange.departures().to_vec();
        let arrivals = exchange.arrivals().to_vec();
        let (stream, rounds) = (Stream::new(), Rounds::default());

        let mut record = |round: u64| {
            let mut started = exchange.start_beside(&stream)?;
            for chunk in &departures {
                let to = started.input_block_memory(chunk.block)?;
                let value = byte(me.index() * 8 + chunk.block.index(), round);
                Rounds::put(&stream, value, to);
                started.depart_on(chunk.block, &stream)?;
            }
            for chunk in &arrivals {
                started.wait_on(*chunk, &stream)?;
                let value = byte(chunk.block.index() * 8 + me.index(), round);
                rounds.look_for(&stream, vec![value; BLOCK_BYTES], started.output_of(chunk.block)?);
            }
            started.finish()
        };

        if captured {
            stream.begin_capture();
            record(1)?;
            record(2)?;
            let graph = stream.end_capture();
            (0..ROUNDS / 2).for_each(|_| graph.replay(&stream));
        } else {
            (1..=ROUNDS).try_for_each(&mut record)?;
        }
        assert!(stream.is_idle_within(LONG));
        assert_eq!(rounds.right(), ROUNDS * ranks as u64);
        drop(exchange);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn blocks_depart_behind_the_work_that_fills_them() {
    for ranks in 1..=4 {
        exchanges(ranks, false);
    }
}

#[test]
fn a_graph_contains_arrivals_and_departures() {
    for ranks in 1..=4 {
        exchanges(ranks, true);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let said = in_group(2, LONG, |mut group| {
        let mut said = Vec::new();
        let (stream, foreign) = (Stream::new(), Foreign);
        let mut plain = group.all_gather::<u8>(1).prepare()?;
        said.push(plain.start_beside(&stream).unwrap_err().to_string());

        let mut exchange = group.all_to_all::<u8>(1).arrivals().departures().prepare()?;
        said.push(exchange.start_beside(&foreign).unwrap_err().to_string());
        let mut started = exchange.start_beside(&stream)?;
        let block = Rank(0);
        said.push(started.wait_on(block, &stream).unwrap_err().to_string());
        said.push(started.depart_on(Rank(7), &stream).unwrap_err().to_string());
        for chunk in [Rank(1), Rank(0)] {
            started.depart_on(chunk, &stream)?;
        }
        said.push(started.depart_on(block, &stream).unwrap_err().to_string());
        said.push(started.wait_on(block, &foreign).unwrap_err().to_string());
        // The same block can be waited for twice.
        started.wait_on(block, &stream)?;
        started.wait_on(block, &stream)?;
        started.finish()?;
        assert!(stream.is_idle_within(LONG));
        drop((plain, exchange));
        group.close()?;
        Ok::<_, Error>(said)
    });
    let said = said.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
    assert_snapshot!(said[0].join("\n"), @r"
    the operation tells no arrivals and waits for no departures; prepare it with `arrivals()` or `departures()`, or use `start_on`
    cannot query whether the stream captures: the stream has the wrong type, expected peerlane_layers::streams::Stream
    block 0 does not arrive before other blocks of the input have departed; let them depart first
    no block 7 departs on this rank; expected a chunk of block 0 or 1
    block 0 has departed already in this start
    cannot order the stream after the engine: the stream has the wrong type, expected peerlane_layers::streams::Stream
    ");
}

/// A start that is finished without all departures says so, and the group ends at its deadline.
#[test]
fn a_block_that_never_departs_is_named() {
    let said = in_group(2, SHORT, |mut group| {
        let me = group.rank();
        let mut exchange = group.all_to_all::<u8>(1).departures().prepare().unwrap();
        let stream = Stream::new();
        let mut started = exchange.start_beside(&stream).unwrap();
        if me == Rank(0) {
            started.depart_on(Rank(1), &stream).unwrap();
            started.depart_on(Rank(0), &stream).unwrap();
        }
        let finished = started.finish().map_err(|error| error.to_string());
        await_end(&group);
        let error = exchange.start_beside(&stream).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))), "{error}");
        assert!(error.to_string().contains("has not let chunk 0 of block 1 depart"), "{error}");
        assert_idle_within(&stream, SHORT);
        finished
    });
    assert_eq!(said[0], Ok(()));
    assert_snapshot!(said[1].as_ref().unwrap_err(), @"chunk 0 of the block for rank 1 has not departed, expected all blocks before the start is finished");
}
