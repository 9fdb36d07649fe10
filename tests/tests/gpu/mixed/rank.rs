//! Opens the fabrics of a rank and gathers, from the side of the rank.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Secret;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::collective::Collective;
use peerlane_collectives::cost::Transfer;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Fallback, Group, GroupOptions, Operation};
use peerlane_collectives::plan::{Algorithm, Tier};
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, DynFabric, ErrorKind, Fabric, LinkKind, Rank};
use peerlane_host as host;
use peerlane_tests::processes::Parent;
use peerlane_tests::{Failure, GpuDriver, Outcome};

use super::access::Access;
use super::processes::{Kind, Scenario};
use crate::blocking;
use crate::support::data::{block, check, same, unexpected};
use crate::vendor::gpu::Gpu;

/// Far above what any start here takes.
const TIMEOUT: Duration = Duration::from_secs(40);
const STARTS: usize = 2;
/// Beyond what it takes to find out that a peer does not answer.
const LOST_WITHIN: Duration = Duration::from_secs(20);

/// Plays what the parent wants, with the memory that it wants, over `network`.
pub(crate) fn run_rank<N: Fabric>(
    parent: &Parent,
    network: impl FnOnce(Rank, usize) -> Outcome<N>,
) -> Outcome {
    let (rank, ranks) = (Rank(parent.value("RANK")?), parent.value("RANKS")?);
    let network = DynFabric::new(network(rank, ranks)?);
    match parent.value("KIND")? {
        Kind::Host => {
            let local = host::Fabric::open(rank, ranks)?;
            Player::open(parent, DynFabric::new(local), network, Access::Host)
        }
        Kind::Cuda => {
            let gpu = Gpu::of_rank(GpuDriver::load::<peerlane_cuda::Context>(), rank.index())?;
            let local = peerlane_cuda::Fabric::open(rank, ranks, gpu.ordinal)?;
            Player::open(parent, DynFabric::new(local), network, Access::of_gpu(gpu)?)
        }
        kind @ (Kind::Rocm | Kind::Sdma) => {
            use peerlane_rocm::{Context, EngineKind, Fabric, Options};
            let devices = GpuDriver::load::<Context>().devices::<Context>()?;
            let engine = match kind {
                Kind::Sdma => EngineKind::Sdma,
                _ => EngineKind::Streams,
            };
            let options = Options { device: rank.0 % devices, engine, ..Options::default() };
            blocking::make_current(options.device);
            let local = Fabric::open_with(rank, ranks, options)?;
            Player::open(parent, DynFabric::new(local), network, Access::Rocm)
        }
    }
}

/// A rank with an open group.
struct Player<'p> {
    parent: &'p Parent,
    group: Group,
    access: Access,
    me: usize,
    ranks: usize,
    round: u64,
}

impl<'p> Player<'p> {
    fn open(parent: &'p Parent, local: DynFabric, network: DynFabric, access: Access) -> Outcome {
        let (me, ranks) = (parent.value("RANK")?, parent.value("RANKS")?);
        let scenario: Scenario = parent.value("SCENARIO")?;
        let nodes: String = parent.value("NODES")?;
        let nodes: Vec<u32> = nodes.split(',').filter_map(|node| node.parse().ok()).collect();
        let topology = Topology::of_nodes(&nodes).map_err(unexpected)?;
        let hub: String = parent.value("HUB")?;
        let secret = Secret::new(&parent.value::<String>("SECRET")?).map_err(unexpected)?;
        let environment =
            Environment { secret: Some(secret), ..Environment::at_hub(hub, Rank::at(me), ranks) };
        let bootstrap =
            TcpBootstrap::join(&environment, Deadline::after(TIMEOUT)).map_err(unexpected)?;
        let options = GroupOptions::default().timeout(TIMEOUT).topology(topology);
        let options = options.strict(scenario == Scenario::Strict);
        let group = options.open_tiers(bootstrap, local, network);
        if scenario == Scenario::Disagrees {
            return disagrees(parent, group.map(drop));
        }
        let group = group.map_err(unexpected)?;
        let player = Self { parent, group, access, me, ranks, round: 0 };
        match scenario {
            Scenario::Killed => player.deserted()?,
            Scenario::Strict => player.refused()?,
            _ => player.gathers()?,
        }
        parent.print_line("done");
        Ok(())
    }

    fn gathers(mut self) -> Outcome {
        let blocks: String = self.parent.value("BLOCKS")?;
        let blocks: Vec<usize> = blocks.split(',').filter_map(|bytes| bytes.parse().ok()).collect();
        let topology = self.group.topology();
        let shape = Shape { tiers: topology.nodes() > 1, ..Shape::default() };
        let fitting: Vec<Algorithm> = schedule::fitting(topology, shape).collect();
        for algorithm in fitting {
            for (index, bytes) in blocks.iter().copied().enumerate() {
                let builder = self.group.all_gather::<u8>(bytes).algorithm(algorithm);
                // In place one time, with two outputs in turn the next.
                let builder = match index % 2 {
                    0 => builder.in_place().chunks(3),
                    _ => builder.outputs(2),
                };
                let mut gather = builder.prepare().map_err(unexpected)?;
                self.check_report(&gather)?;
                let lens = vec![bytes; self.ranks];
                self.starts(&mut gather, &lens, format_args!("{algorithm}, {bytes} bytes"))?;
            }
            // Uneven blocks, one of them empty.
            let lens: Vec<usize> = (0..self.ranks).map(|rank| rank * 30_007 % 70_000).collect();
            let builder = self.group.all_gather::<u8>(&lens).algorithm(algorithm).chunks(2);
            let mut gather = builder.prepare().map_err(unexpected)?;
            self.starts(&mut gather, &lens, format_args!("{algorithm}, uneven"))?;
            self.parent.print_line(format_args!("passed {algorithm}"));
        }
        self.launches(&blocks)?;
        // Memory that is exchanged once, and gathered over in place.
        let len = 2003;
        let window = self.group.window::<u8>(len * self.ranks + 90).map_err(unexpected)?;
        let builder = self.group.all_gather(len).output_into(&window, 33).in_place();
        let mut gather = builder.prepare().map_err(unexpected)?;
        let lens = vec![len; self.ranks];
        self.starts(&mut gather, &lens, "over a window")?;
        drop((gather, window));
        self.group.close().map_err(unexpected)
    }

    /// Returns whether the copies inside a node can be one launch.
    fn can_launch(&self) -> bool {
        let topology = self.group.topology();
        let is_offered = self.group.engines().iter().any(|it| it.name().starts_with("kernels"));
        is_offered && topology.nodes() < topology.ranks()
    }

    /// Gathers with one launch for what moves inside a node, if all ranks have devices that can.
    fn launches(&mut self, blocks: &[usize]) -> Outcome {
        if !self.can_launch() {
            return Ok(());
        }

        let algorithms = [Algorithm::Direct, Algorithm::Hierarchical, Algorithm::HierarchicalRing];
        for (number, algorithm) in algorithms.into_iter().enumerate() {
            for (index, bytes) in blocks.iter().copied().enumerate() {
                let builder = self.group.all_gather::<u8>(bytes).algorithm(algorithm);
                let builder = builder.engine("kernels").transfer(Transfer::Direct);
                let builder = match (number + index) % 3 {
                    0 => builder.in_place(),
                    1 => builder.outputs(2),
                    // Only the chunks of a hierarchical start follow each other over the network.
                    _ if algorithm != Algorithm::Direct => builder.outputs(1).chunks(2),
                    _ => builder.outputs(1),
                };
                let mut gather = builder.prepare().map_err(unexpected)?;
                let is_launch = gather.report().launch.is_some();
                check(is_launch, || format!("no launch: {}", gather.report()))?;
                let lens = vec![bytes; self.ranks];
                self.starts(
                    &mut gather,
                    &lens,
                    format_args!("{algorithm}, launch, {bytes} bytes"),
                )?;
            }
        }
        for bytes in [5, 4001] {
            self.reductions(bytes)?;
        }
        self.parent.print_line("passed launches");
        Ok(())
    }

    /// Adds bytes of all ranks by one launch on each, which waits for those of other nodes.
    fn reductions(&mut self, bytes: usize) -> Outcome {
        let (me, ranks) = (self.me, self.ranks);
        let last = Rank::at(ranks - 1);
        // What is added of each input, and the ranks that add.
        let own = me * bytes..(me + 1) * bytes;
        let everywhere = |range| (range, true);
        let cases = [
            (Collective::ReduceScatter, bytes * ranks, everywhere(own)),
            (Collective::AllReduce, bytes, everywhere(0..bytes)),
            (Collective::Reduce { root: last }, bytes, (0..bytes, me + 1 == ranks)),
        ];
        for (collective, input, (range, adds)) in cases {
            let builder = self.group.operation::<u8>(collective, bytes).engine("kernels");
            let mut operation = builder.prepare().map_err(unexpected)?;
            let is_launch = operation.report().launch.is_some();
            check(is_launch, || format!("no launch: {}", operation.report()))?;
            for _ in 0..3 {
                self.round += 1;
                let place = operation.input_memory().map_err(unexpected)?;
                self.access.write(place, &block(me, self.round, input))?;
                operation.run().map_err(|error| unexpected(error).within(collective))?;
                if !adds {
                    continue;
                }
                let given = (0..ranks).map(|rank| block(rank, self.round, input));
                let given: Vec<Vec<u8>> = given.map(|all| all[range.clone()].to_vec()).collect();
                let sum =
                    |at: usize| given.iter().fold(0, |sum: u8, one| sum.wrapping_add(one[at]));
                let wanted: Vec<u8> = (0..bytes).map(sum).collect();
                let seen = self.access.read(operation.output_memory())?;
                same(format_args!("{collective}, {bytes} bytes"), &seen, &wanted)?;
            }
        }
        Ok(())
    }

    fn starts(
        &mut self,
        gather: &mut Operation<u8>,
        lens: &[usize],
        what: impl std::fmt::Display,
    ) -> Outcome {
        for _ in 0..STARTS {
            self.round += 1;
            let place = gather.input_memory().map_err(unexpected)?;
            self.access.write(place, &block(self.me, self.round, lens[self.me]))?;
            gather.run().map_err(|error| unexpected(error).within(&what))?;
            let seen = self.access.read(gather.output_memory())?;
            let blocks = lens.iter().enumerate();
            let blocks = blocks.map(|(rank, bytes)| block(rank, self.round, *bytes));
            let wanted = blocks.collect::<Vec<_>>().concat();
            same(format_args!("{what}, start {}", self.round), &seen, &wanted)?;
        }
        Ok(())
    }

    /// What goes through the host is said; what does not is not.
    fn check_report(&self, gather: &Operation<u8>) -> Outcome {
        let report = gather.report();
        let on_device = self.access.is_device();
        let own = report.fallbacks.iter().any(|it| matches!(it, Fallback::Staged { .. }));
        check(own == on_device, || format!("{report} on memory of a device: {on_device}"))?;
        let far = report.links.iter().filter(|link| link.tier == Tier::Network);
        let far = far.filter(|link| link.peer.index() != self.me);
        let staged = far.filter(|link| link.kind == LinkKind::HostStaged).count();
        check(!on_device || staged > 0, || format!("no peer through the host: {report}"))
    }

    /// With `strict`, on all ranks alike.
    fn refused(mut self) -> Outcome {
        let refused = self.group.all_gather::<u8>(100).algorithm(Algorithm::Direct).prepare();
        let error = match refused {
            Ok(_) => return Err(Failure::new("a fallback was not refused")),
            Err(error) => error,
        };
        let text = error.to_string();
        let named = text.contains("through host memory");
        check(named, || format!("the refusal does not name the fallback: {text}"))
    }

    /// Gathers until a peer is gone; that is an error, and soon.
    fn deserted(mut self) -> Outcome {
        let launches = self.can_launch();
        let algorithm = if launches { Algorithm::Hierarchical } else { Algorithm::Direct };
        let builder = self.group.all_gather::<u8>(3_000_001).algorithm(algorithm);
        let builder = if launches { builder.engine("kernels") } else { builder };
        let mut gather = builder.prepare().map_err(unexpected)?;
        let start = Instant::now();
        loop {
            let begun = Instant::now();
            if let Err(error) = gather.run() {
                let (kind, took) = (error.kind(), begun.elapsed());
                let known = [ErrorKind::PeerLost, ErrorKind::Aborted].contains(&kind);
                let named = error.to_string().contains(&format!("rank {}", self.ranks - 1));
                return check(known && named && took < LOST_WITHIN, || {
                    format!("after {took:?}: {error} ({kind})")
                });
            }
            self.parent.print_line("under way");
            check(start.elapsed() < TIMEOUT, || "nobody was killed".to_owned())?;
        }
    }
}

/// Ranks 0 and 1 share a node, and have memory of two kinds.
fn disagrees(parent: &Parent, opened: Result<(), Error>) -> Outcome {
    let Err(error) = opened else { return Err(Failure::new("the group was opened")) };
    let wanted = "open: ranks of one node disagree: backend is host on rank 1, cuda on rank 0; open the same backend on both";
    check(error.to_string() == wanted && error.peer() == Some(Rank(1)), || error.to_string())?;
    parent.print_line("done");
    Ok(())
}
