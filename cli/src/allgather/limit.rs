//! Measures the limit of an all-gather on the host: bare copies of the same sizes between buffers
//! of the same kind, all at once. No flags are used; a barrier separates the iterations.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{At, DynFabric, Op, Role};
use peerlane::{Group, Rank};

use super::timer::TimingOptions;
use crate::error::Result;
use crate::ranks::affinity;
use crate::ranks::bare_fabric::{BareEngine, BareFabric};
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{Interval, longest_of_each, span_of_each};

/// The copies of one all-gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitCopies {
    /// Offset of this rank's shard in the output.
    pub(crate) own_offset: u64,
    /// Bytes of this rank's shard.
    pub(crate) shard_bytes: u64,
    /// Bytes of all shards.
    pub(crate) total_bytes: u64,
    /// Whether the self copy is left out.
    pub(crate) in_place: bool,
}

/// Measures bare copies over several fabrics that copy in different ways; the fastest is the limit.
pub(crate) struct Limit {
    copiers: Vec<(BareFabric, BareEngine)>,
    /// Reduces the times of all ranks to one time per iteration.
    reduce: fn(&[Vec<Interval>]) -> Vec<Duration>,
}

impl Limit {
    /// Connects the fabrics of ranks on `hosts` hosts. Collective.
    ///
    /// # Errors
    /// If a fabric cannot be opened.
    pub(crate) fn open(copiers: Vec<DynFabric>, comm: &Comm, hosts: usize) -> Result<Self> {
        let copiers = copiers.into_iter().map(|fabric| {
            let mut fabric = BareFabric::open(fabric, comm)?;
            let engine = fabric.engine()?;
            Ok((fabric, engine))
        });
        // If each rank has its own core, the times of the ranks count. Ranks that share cores run one
        // after the other, which the time of one rank does not show. The span of all ranks needs a
        // common clock, which exists only on one host.
        let own = hosts > 1 || comm.ranks() <= affinity::cores();
        let reduce = if own { longest_of_each } else { span_of_each };
        Ok(Self { copiers: copiers.collect::<Result<_>>()?, reduce })
    }

    /// Returns the median time of the copies over the fastest fabric. Collective.
    ///
    /// # Errors
    /// If memory cannot be allocated, or a copy fails.
    pub(crate) fn measure(
        &mut self,
        copies: LimitCopies,
        timing_options: TimingOptions,
        comm: &Comm,
        group: &mut Group,
    ) -> Result<Duration> {
        let mut best = Duration::MAX;
        let reduce = self.reduce;
        for copier in &mut self.copiers {
            best = best.min(measure_one(copier, copies, timing_options, (comm, group), reduce)?);
        }
        Ok(best)
    }
}

fn measure_one(
    (fabric, engine): &mut (BareFabric, BareEngine),
    LimitCopies { own_offset, shard_bytes, total_bytes, in_place }: LimitCopies,
    timing_options: TimingOptions,
    (comm, group): (&Comm, &mut Group),
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
        // SAFETY: the regions outlive the last ticket on this rank and, because of the barrier below,
        // on every rank. Nothing else reads or writes the ranges that the puts cover.
        let ticket = unsafe { engine.submit(&puts) }?;
        engine.finish(ticket)
    };
    let timings = timing_options.time(comm, group, reduce, &mut [&mut copy])?;
    // Peers may still copy into the output of this rank.
    group.barrier()?;
    Ok(timings[0].statistics.median)
}
