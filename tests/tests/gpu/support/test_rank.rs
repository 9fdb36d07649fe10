//! Holds what a rank uses during a scenario: its device, a stream, and an open group.

use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::group::{Group, GroupOptions, Operation, OperationBuilder};
use peerlane_hal::{Deadline, Rank};
use peerlane_tests::processes::Parent;
use peerlane_tests::{GpuDriver, Outcome};

use super::data::{POISON, block, gathered, same, unexpected};
use crate::vendor::gpu::Gpu;
use crate::vendor::stream::CallerStream;
use crate::vendor::{Context, Fabric, options};

/// Far above what any start here takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);

/// One rank, with its group.
pub(crate) struct TestRank {
    pub(crate) gpu: Gpu,
    pub(crate) stream: CallerStream,
    pub(crate) group: Group,
    pub(crate) me: usize,
    pub(crate) ranks: usize,
    /// Where more groups of these ranks can meet.
    pub(crate) hubs: Vec<String>,
    /// Of this rank alone.
    pub(crate) random: fastrand::Rng,
    /// The last round, whose number is that of its data.
    pub(crate) round: u64,
}

impl TestRank {
    /// What the parent has told this rank to be.
    pub(crate) fn open(parent: &Parent) -> Outcome<Self> {
        Self::open_as(parent, parent.value("RANK")?)
    }

    /// One of several ranks of this process.
    pub(crate) fn open_as(parent: &Parent, me: usize) -> Outcome<Self> {
        let ranks = parent.value("RANKS")?;
        let hubs: String = parent.value("HUBS")?;
        let mut hubs: Vec<String> = hubs.split(',').map(str::to_owned).collect();
        let gpu = Gpu::of_rank(GpuDriver::load::<Context>(), me)?;
        let stream = gpu.stream()?;
        let group = open_group(&gpu, &hubs.remove(0), me, ranks, TIMEOUT)?;
        let random = fastrand::Rng::with_seed(me as u64);
        Ok(Self { gpu, stream, group, me, ranks, hubs, random, round: 0 })
    }

    /// A number for data that was not used before, the same on all ranks.
    pub(crate) fn next_round(&mut self) -> u64 {
        self.round += 1;
        self.round
    }

    /// One start that the host waits for, with data of its own.
    pub(crate) fn gather_once(&mut self, gather: &mut Operation<u8>) -> Outcome {
        let round = self.next_round();
        let (me, ranks) = (self.me, self.ranks);
        gather_once(&self.gpu, &self.stream, gather, (me, ranks), round)
    }
}

/// One start that the host waits for; the data is checked.
pub(crate) fn gather_once(
    gpu: &Gpu,
    stream: &CallerStream,
    gather: &mut Operation<u8>,
    (me, ranks): (usize, usize),
    round: u64,
) -> Outcome {
    let input = gather.input_memory().map_err(unexpected)?;
    let (bytes, total) = (input.bytes as usize, input.bytes as usize * ranks);
    let (send, receive) = (gpu.pinned(bytes)?, gpu.pinned(total)?);
    send.write(0, &block(me, round, bytes));
    stream.copy_in(input.base.as_ptr() as u64, &send, 0, bytes)?;
    stream.finish()?;
    gather.run().map_err(unexpected)?;
    let output = gather.output_memory();
    let base = output.base.as_ptr() as u64;
    stream.copy_out(&receive, 0, base, total)?;
    stream.fill(base, POISON, total)?;
    stream.finish()?;
    same(format!("round {round}"), &receive.read(0, total), &gathered(ranks, round, bytes))
}

/// A group of all ranks that meet at the hub.
pub(crate) fn open_group(
    gpu: &Gpu,
    hub: &str,
    me: usize,
    ranks: usize,
    timeout: Duration,
) -> Outcome<Group> {
    open_group_with(gpu, hub, (me, ranks), GroupOptions::default().timeout(timeout))
}

/// The same, as the options say.
pub(crate) fn open_group_with(
    gpu: &Gpu,
    hub: &str,
    (me, ranks): (usize, usize),
    group: GroupOptions,
) -> Outcome<Group> {
    let environment = Environment::at_hub(hub, Rank::at(me), ranks);
    let bootstrap =
        TcpBootstrap::join(&environment, Deadline::after(TIMEOUT)).map_err(unexpected)?;
    let fabric = Fabric::open_with(Rank::at(me), ranks, options(gpu.ordinal))?;
    group.open(bootstrap, fabric).map_err(unexpected)
}

/// How a gather is prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    InPlace,
    OneOutput,
    TwoOutputs,
}

impl Form {
    pub(crate) const ALL: [Self; 3] = [Self::InPlace, Self::OneOutput, Self::TwoOutputs];

    pub(crate) fn of<'g>(self, builder: OperationBuilder<'g, u8>) -> OperationBuilder<'g, u8> {
        match self {
            Self::InPlace => builder.in_place(),
            Self::OneOutput => builder.outputs(1),
            Self::TwoOutputs => builder.outputs(2),
        }
    }
}

/// Whom a capture forbids calls that might disturb it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureMode {
    /// Every thread.
    Global,
    /// The one that records.
    ThreadLocal,
}
