//! The physical limit: as many concurrent plain copies of the same sizes between the same kind of
//! buffers as the operation must make. No flags; a barrier between iterations.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{At, Fabric, Op, Role};
use peerlane::{Group, Rank};

use super::timer::TimingOptions;
use crate::error::Result;
use crate::ranks::affinity;
use crate::ranks::bare_fabric::{BareEngine, BareFabric};
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{Interval, longest_of_each, span_of_each};

/// The copies of one all-gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copies {
    /// Where this rank's shard begins among all.
    pub(crate) own_offset: u64,
    /// The bytes of this rank's shard.
    pub(crate) shard_bytes: u64,
    /// The bytes of all shards.
    pub(crate) total_bytes: u64,
    /// The own shard needs no copy.
    pub(crate) in_place: bool,
}

/// Fabrics that copy in unlike copiers; the fastest is the limit.
pub(crate) struct Limit<F: Fabric> {
    copiers: Vec<(BareFabric<F>, BareEngine<F>)>,
    /// What makes one time of an iteration.
    reduce: fn(&[Vec<Interval>]) -> Vec<Duration>,
}

impl<F: Fabric> Limit<F> {
    /// Over these fabrics, between ranks on so many hosts. Collective.
    ///
    /// # Errors
    /// If one refuses.
    pub(crate) fn open(copiers: Vec<F>, comm: &Comm, hosts: usize) -> Result<Self> {
        let copiers = copiers.into_iter().map(|fabric| {
            let mut fabric = BareFabric::open(fabric, comm)?;
            let engine = fabric.engine()?;
            Ok((fabric, engine))
        });
        // With a core for each rank, each one's own time counts. Ranks that share cores run one after
        // the other, which their own times leave out; but only on one host they have one clock.
        let own = hosts > 1 || comm.ranks() <= affinity::cores();
        let reduce = if own { longest_of_each } else { span_of_each };
        Ok(Self { copiers: copiers.collect::<Result<_>>()?, reduce })
    }

    /// The median time of the copies, in the fastest copier. Collective.
    ///
    /// # Errors
    /// If memory cannot be had, or a copy fails.
    pub(crate) fn measure(
        &mut self,
        copies: Copies,
        pace: TimingOptions,
        comm: &Comm,
        group: &mut Group<F>,
    ) -> Result<Duration> {
        let mut best = Duration::MAX;
        let reduce = self.reduce;
        for copier in &mut self.copiers {
            best = best.min(measure_one(copier, copies, pace, (comm, group), reduce)?);
        }
        Ok(best)
    }
}

fn measure_one<F: Fabric>(
    (fabric, engine): &mut (BareFabric<F>, BareEngine<F>),
    Copies { own_offset, shard_bytes, total_bytes, in_place }: Copies,
    pace: TimingOptions,
    (comm, group): (&Comm, &mut Group<F>),
    reduce: fn(&[Vec<Interval>]) -> Vec<Duration>,
) -> Result<Duration> {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let output = fabric.allocate(total_bytes, Role::Data)?;
    let input = if in_place { None } else { Some(fabric.allocate(shard_bytes, Role::Data)?) };
    let outputs = fabric.import(&output)?;
    let src = match &input {
        Some(region) => At { region, offset: 0 },
        None => At { region: &output, offset: own_offset },
    };
    let first = if in_place { 1 } else { 0 };
    let puts: Vec<_> = (first..ranks)
        .map(|step| Rank::at((rank.index() + step) % ranks))
        .map(|peer| {
            let dst = At { region: &outputs[peer.index()], offset: own_offset };
            Op::Put { dst, src, bytes: shard_bytes }
        })
        .collect();
    let mut copy = || {
        // SAFETY: the regions live until after the last ticket has completed here and, behind the
        // barrier below, on every rank; nobody reads or writes what a rank's own puts cover.
        let ticket = unsafe { engine.submit(&puts) }?;
        engine.finish(ticket)
    };
    let timings = pace.time(comm, group, reduce, &mut [&mut copy])?;
    // Peers may still copy into this rank's output.
    group.barrier()?;
    Ok(timings[0].statistics.median)
}
