//! Runs a rank that loses a peer, and the peer that is lost.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use peerlane_collectives::error::Error;
use peerlane_collectives::group::Operation;
use peerlane_test_support::Stopwatch;
use peerlane_tests::processes::Parent;
use peerlane_tests::{Failure, Gpu as _, GpuDriver, Outcome};

use super::rank::fallen;
use crate::support::data::{POISON, same, unexpected};
use crate::support::test_rank::{CaptureMode, TestRank, gather_once};
use crate::vendor::Context;
use crate::vendor::stream::Graph;

const STARTS: usize = 3;
const BLOCK_BYTES: usize = 5001;
/// How often a survivor replays its graph.
const REPLAYS: usize = 2;
/// How long a start is driven whose copies are to be under way.
const PUSHED: Duration = Duration::from_millis(15);
/// Within which a stream must be free again whatever happens.
const PATIENCE: Duration = Duration::from_secs(15);

/// What the victim has done when it is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing; the others have starts on their streams.
    BeforeItStarts,
    /// Nothing; the others wait on the host.
    HostWaits,
    /// Its starts are on its stream and run.
    WhileItPushes,
    /// All of its starts are complete; the others have more of them.
    AfterItPushed,
    /// The others replay graphs.
    Replayed,
    /// The others replay graphs of many starts.
    ReplayedMany,
    /// The others replay graphs of many starts, and drop the operation before the graphs have run.
    DroppedReplays,
    /// Nothing; the others have starts on their streams, and drop another operation.
    BesideADrop,
}

impl Phase {
    pub(crate) const ALL: [Self; 8] = [
        Self::BeforeItStarts,
        Self::HostWaits,
        Self::WhileItPushes,
        Self::AfterItPushed,
        Self::Replayed,
        Self::ReplayedMany,
        Self::DroppedReplays,
        Self::BesideADrop,
    ];

    pub(crate) fn is_replayed(self) -> bool {
        matches!(self, Self::Replayed | Self::ReplayedMany | Self::DroppedReplays)
    }

    fn block_bytes(self, driver: GpuDriver) -> usize {
        match (self, driver) {
            // Long enough for a signal to arrive before the copies are over.
            (Self::WhileItPushes, GpuDriver::Device) => 256 << 20,
            (Self::WhileItPushes, GpuDriver::Simulated) => 64 << 10,
            // Long enough for branches in the graph.
            (Self::ReplayedMany | Self::DroppedReplays, _) => (1 << 20) + 1,
            _ => BLOCK_BYTES,
        }
    }

    fn starts(self, driver: GpuDriver) -> usize {
        match (self, driver) {
            (Self::WhileItPushes, GpuDriver::Device) => 100,
            (Self::ReplayedMany | Self::DroppedReplays, GpuDriver::Device) => 2000,
            (Self::ReplayedMany | Self::DroppedReplays, GpuDriver::Simulated) => 100,
            _ => STARTS,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BeforeItStarts => "before_it_starts",
            Self::HostWaits => "host_waits",
            Self::WhileItPushes => "while_it_pushes",
            Self::AfterItPushed => "after_it_pushed",
            Self::Replayed => "replayed",
            Self::ReplayedMany => "replayed_many",
            Self::DroppedReplays => "dropped_replays",
            Self::BesideADrop => "beside_a_drop",
        })
    }
}

impl FromStr for Phase {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|phase| phase.to_string() == text).ok_or(())
    }
}

pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    let (phase, victim): (Phase, bool) = (parent.value("PHASE")?, parent.value("VICTIM")?);
    let timeout = Duration::from_millis(parent.value("TIMEOUT_MILLIS")?);
    let mut test_rank = TestRank::open(parent)?;
    let (bytes, group) = (phase.block_bytes(test_rank.gpu.driver), &mut test_rank.group);
    let builder = match parent.value("REDUCES")? {
        true => group.all_reduce::<u8>(bytes),
        false => group.all_gather(bytes),
    };
    let engine: String = parent.value("ENGINE")?;
    let builder = builder.outputs(1).timeout(timeout).engine(engine);
    let builder = match phase.is_replayed() {
        // SAFETY: the stream is finished before the operation is dropped, and the host borrows nothing.
        true => unsafe { builder.capturable() },
        false => builder,
    };
    let mut gather = builder.prepare().map_err(unexpected)?;
    let mut other = None;
    if phase == Phase::BesideADrop {
        // SAFETY: no graph records the operation.
        let builder = unsafe { test_rank.group.all_gather::<u8>(BLOCK_BYTES).capturable() };
        let gather = other.insert(builder.prepare().map_err(unexpected)?);
        gather.run().map_err(unexpected)?;
    }
    if victim {
        be_lost(parent, &test_rank, gather, phase)
    } else {
        let (error, graph) = lose(parent, &mut test_rank, (&mut gather, other), phase)?;
        parent.print_line(fallen("start", &error));

        if let Some(graph) = graph {
            // The waits of these replays pass, so they take as long as the work of those before.
            let driver = test_rank.gpu.driver;
            let (waits_before, watch) = (blocked_waits(driver), Stopwatch::start());
            replay(&graph)?;
            test_rank.stream.finish_within(PATIENCE)?;
            let (took, waits) = (watch.elapsed(), blocked_waits(driver) - waits_before);
            let (total, net) = (took.total.as_micros(), took.net().as_micros());
            parent.print_line(format_args!("replayed in {total} {net} {waits}"));
        }

        drop(gather);
        live_on(parent, &test_rank)
    }
}

/// The victim: comes to its place and goes no further.
fn be_lost(
    parent: &Parent,
    test_rank: &TestRank,
    mut gather: Operation<u8>,
    phase: Phase,
) -> Outcome {
    match phase {
        Phase::WhileItPushes if gather.report().takes_streams() => {
            queue(test_rank, &mut gather, phase).map_err(unexpected)?;
        }
        Phase::WhileItPushes => push(&mut gather).map_err(unexpected)?,
        Phase::AfterItPushed => {
            queue(test_rank, &mut gather, phase).map_err(unexpected)?;
            test_rank.stream.finish()?;
        }
        _ => {}
    }
    parent.halt("its place")?;
    // It was not killed, only late.
    match gather.run() {
        Ok(()) => Err(Failure::new("a start of a group that is over has finished")),
        Err(error) => {
            parent.print_line(fallen("start", &error));
            Ok(())
        }
    }
}

/// Drives a start until its copies are with the engines, which take longer than that.
fn push(gather: &mut Operation<u8>) -> Result<(), Error> {
    let begun = Instant::now();
    let mut start = gather.start()?;
    while begun.elapsed() < PUSHED && !start.poll()? {}
    Ok(())
}

fn queue(test_rank: &TestRank, gather: &mut Operation<u8>, phase: Phase) -> Result<(), Error> {
    let stream = test_rank.stream.for_starts();
    (0..phase.starts(test_rank.gpu.driver)).try_for_each(|_| gather.start_on(&stream).map(drop))
}

fn replay(graph: &Graph) -> Outcome {
    (0..REPLAYS).try_for_each(|_| graph.replay())
}

/// Returns how many waits have not passed at once. Only the simulated driver counts them.
fn blocked_waits(driver: GpuDriver) -> i64 {
    match driver {
        GpuDriver::Simulated => Context::simulate().counter("blocked_waits", None),
        GpuDriver::Device => 0,
    }
}

/// Waits for the victim, as a survivor does, and returns the error of its group and the graph that can be replayed again.
///
/// Nobody asks for the state of a start on a stream meanwhile: the stream must go on by itself.
fn lose(
    parent: &Parent,
    test_rank: &mut TestRank,
    (gather, other): (&mut Operation<u8>, Option<Operation<u8>>),
    phase: Phase,
) -> Outcome<(Error, Option<Graph>)> {
    let mut replayed = None;
    match phase {
        _ if phase == Phase::HostWaits || !gather.report().takes_streams() => {
            parent.print_line("waits");
            let error = gather.run().err();
            let error = error.ok_or_else(|| Failure::new("a start without a peer ended"))?;
            return Ok((error, None));
        }
        _ if phase.is_replayed() => {
            let stream = &test_rank.stream;
            let mode = CaptureMode::Global;
            let graph =
                stream.record(mode, || queue(test_rank, gather, phase).map_err(unexpected))?;
            // A device has no room for many starts, so the call blocks.
            parent.print_line("waits");
            replay(&graph)?;
            if phase == Phase::DroppedReplays {
                while gather.check().is_ok() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            } else {
                stream.finish_within(PATIENCE)?;
                replayed = Some(graph);
            }
        }
        _ => {
            if phase == Phase::AfterItPushed {
                queue(test_rank, gather, phase).map_err(unexpected)?;
                test_rank.stream.finish()?;
            }
            queue(test_rank, gather, phase).map_err(unexpected)?;
            parent.print_line("waits");
            drop(other);
            test_rank.stream.finish_within(PATIENCE)?;
        }
    }

    let late = gather.run().err();
    let error = late.ok_or_else(|| Failure::new("a start of a group that is over has finished"))?;
    Ok((error, replayed))
}

/// Uses the device as before, and shrinks the group to those who are left.
fn live_on(parent: &Parent, test_rank: &TestRank) -> Outcome {
    let TestRank { gpu, stream, group, .. } = test_rank;
    let (memory, seen) = (gpu.memory(1000)?, gpu.pinned(1000)?);
    stream.copy_out(&seen, 0, memory.address, 1000)?;
    stream.finish_within(PATIENCE)?;
    same("memory of the device", &seen.read(0, 1000), &[POISON; 1000])?;
    parent.print_line("alive");
    let mut shrunk = group.shrink().map_err(unexpected)?;
    let (me, ranks) = (shrunk.rank().index(), shrunk.ranks());
    let mut gather = shrunk.all_gather::<u8>(5001).prepare().map_err(unexpected)?;
    for round in 1..=3 {
        gather_once(gpu, stream, &mut gather, (me, ranks), round)?;
    }
    drop(gather);
    shrunk.close().map_err(unexpected)?;
    parent.print_line(format_args!("shrunk to rank {me} of {ranks}"));
    Ok(())
}
