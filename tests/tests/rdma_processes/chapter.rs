//! What a rank plays.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::Tcp;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_conformance::processes::Parent;
use peerlane_conformance::{Failure, Outcome};
use peerlane_hal::{Deadline, ErrorKind, Fabric, Rank, host};
use peerlane_rdma::{DeviceChoice, Options};

use crate::rdma_support::{shard, unexpected};

/// Far above what any start here takes.
const TIMEOUT: Duration = Duration::from_secs(30);
const SHARD_BYTES: [usize; 3] = [1, 5001, 300_000];
const STARTS: u64 = 3;
/// Beyond what a card needs to find out that a peer does not answer.
const LOST_WITHIN: Duration = Duration::from_secs(20);

/// What a group does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chapter {
    /// One fabric for all ranks.
    Network,
    /// Memory of the host inside a node.
    Tiers,
    /// The last rank is killed.
    Killed,
}

impl fmt::Display for Chapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network => "network",
            Self::Tiers => "tiers",
            Self::Killed => "killed",
        })
    }
}

impl FromStr for Chapter {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all = [Self::Network, Self::Tiers, Self::Killed];
        all.into_iter().find(|chapter| chapter.to_string() == text).ok_or(())
    }
}

/// One rank of a chapter.
pub(crate) fn play(parent: &Parent) -> Outcome {
    let chapter: Chapter = parent.value("CHAPTER")?;
    let (rank, ranks) = (Rank(parent.value("RANK")?), parent.value("RANKS")?);
    let device = DeviceChoice::Name(parent.value("DEVICE")?);
    let nodes: String = parent.value("NODES")?;
    let nodes: Vec<u32> = nodes.split(',').filter_map(|node| node.parse().ok()).collect();
    let topology = Topology::of_nodes(&nodes).map_err(unexpected)?;
    let hub: String = parent.value("HUB")?;
    let environment = Environment::at_hub(hub, rank, ranks);
    let bootstrap = Tcp::join(&environment, Deadline::after(TIMEOUT)).map_err(unexpected)?;
    let options = Options { device, ..Options::default() };
    let network = peerlane_rdma::Fabric::open_with(rank, ranks, options)?;
    let group = GroupOptions::default().timeout(TIMEOUT).topology(topology);
    match chapter {
        Chapter::Network => gathers(parent, group.open(bootstrap, network).map_err(unexpected)?),
        Chapter::Tiers => {
            let local = host::Fabric::open(rank, ranks)?;
            gathers(parent, group.open_tiers(bootstrap, local, network).map_err(unexpected)?)
        }
        Chapter::Killed => deserted(parent, group.open(bootstrap, network).map_err(unexpected)?),
    }
}

/// Every algorithm, with shards of all sizes, several starts each.
fn gathers<F: Fabric>(parent: &Parent, mut group: Group<F>) -> Outcome {
    let (me, ranks) = (parent.value::<usize>("RANK")?, parent.value::<usize>("RANKS")?);
    let mut round = 0;
    for algorithm in Algorithm::ALL.iter().copied() {
        for bytes in SHARD_BYTES {
            let builder = group.all_gather::<u8>(bytes).algorithm(algorithm).outputs(2);
            let mut gather = builder.prepare().map_err(unexpected)?;
            for _ in 0..STARTS {
                round += 1;
                let place = gather.input_mut().map_err(unexpected)?;
                place.copy_from_slice(&shard(me, round, bytes));
                let what = || format!("{algorithm}, {bytes} bytes, start {round}");
                gather.run().map_err(|error| unexpected(error).within(what()))?;
                let seen = gather.output().map_err(unexpected)?;
                for (rank, seen) in seen.chunks(bytes).enumerate().take(ranks) {
                    if seen != shard(rank, round, bytes) {
                        let what = what();
                        return Err(Failure::new(format!("{what}: wrong shard of rank {rank}")));
                    }
                }
            }
        }
        parent.say(format_args!("passed {algorithm}"));
    }
    group.close().map_err(unexpected)?;
    parent.say("done");
    Ok(())
}

/// Gathers until a peer is gone; that is an error, and soon.
fn deserted<F: Fabric>(parent: &Parent, mut group: Group<F>) -> Outcome {
    let builder = group.all_gather::<u8>(300_000).algorithm(Algorithm::Direct);
    let mut gather = builder.prepare().map_err(unexpected)?;
    let start = Instant::now();
    loop {
        let begun = Instant::now();
        match gather.run() {
            Ok(()) => {}
            Err(error) => {
                let (kind, took) = (error.kind(), begun.elapsed());
                let known = [ErrorKind::PeerLost, ErrorKind::Aborted];
                if !known.contains(&kind) || took > LOST_WITHIN {
                    return Err(Failure::new(format!("after {took:?}: {error} ({kind})")));
                }
                parent.say(format_args!("passed {error}"));
                parent.say("done");
                return Ok(());
            }
        }
        parent.say("under way");
        if start.elapsed() > TIMEOUT {
            return Err(Failure::new("nobody was killed"));
        }
    }
}
