//! Runs a rank's side of every scenario.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Secret;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::schedule::{self, Shape};
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_host as host;
use peerlane_rdma::{DeviceChoice, Options};
use peerlane_tests::middleware::{Stream, StreamLayer, Wrapped};
use peerlane_tests::processes::Parent;
use peerlane_tests::processes::nodes::open_network;
use peerlane_tests::{Failure, Outcome, pattern};
use rustix::time::{ClockId, clock_gettime};

use crate::rounds::Rounds;
use crate::stopped::{self, Waits};

/// Far above what any start here takes.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// The same where a rank is stopped, and only deadlines tell.
const STOPPED_TIMEOUT: Duration = Duration::from_secs(6);
const BLOCK_BYTES: [usize; 3] = [1, 5001, 300_000];
const STARTS: u64 = 3;
/// Beyond what a NIC needs to find out that a peer does not answer.
const LOST_WITHIN: Duration = Duration::from_secs(20);

/// What is gathered beside waiting.
const IDLE_BLOCK_BYTES: usize = 100_000;
const BUSY_STARTS: usize = 20;
/// How long a graph is not replayed.
const ARMED: Duration = Duration::from_millis(300);
/// Number of such times.
const ARMED_TIMES: usize = 3;
/// By how much a rank is late, and how often: what else this machine does can disturb one wait.
const LATE: Duration = Duration::from_secs(3);
/// The least lateness as a multiple of the processor time of a start. A nap is a sixteenth of the wait so far, so a wait of 30
/// starts, which is as long as about 300 polls, spends a seventh to a fifth of its time on polls, on any machine. A long wait
/// spends less.
const LATE_IN_STARTS: u32 = 80;
const LATE_STARTS: usize = 3;
/// Per cent of a processor while a graph is not replayed; whoever looks all the time uses all of one.
const IDLE_MAX: f64 = 50.0;
/// The same of a rank that waits for a peer, in the quietest of its waits. A rank that polls without sleeping
/// uses all of a processor in every one of them, however busy the machine is.
const WAITING_MAX: f64 = 20.0;

/// What a group does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    /// One fabric for all ranks.
    Network,
    /// Memory of the host inside a node.
    Tiers,
    /// Starts on a stream, and in a graph, with the network beside it.
    Streams,
    /// One fabric, and a rank that lets the others wait.
    Idle,
    /// The same with memory of the host inside a node.
    IdleTiers,
    /// The last rank is killed.
    Killed,
    /// The last rank is stopped: its NIC and its connections live.
    Stopped,
    /// The same without a group, while one rank sends messages to the other.
    Stalled,
    /// The same, and that rank never sleeps.
    StalledAwake,
}

impl Scenario {
    const ALL: [Self; 9] = [
        Self::Network,
        Self::Tiers,
        Self::Streams,
        Self::Idle,
        Self::IdleTiers,
        Self::Killed,
        Self::Stopped,
        Self::Stalled,
        Self::StalledAwake,
    ];

    /// Whether something happens to the last rank.
    pub(crate) fn has_victim(self) -> bool {
        self.is_stalled() || matches!(self, Self::Killed | Self::Stopped)
    }

    /// Whether the scenario is about queue pairs of RDMA.
    pub(crate) fn is_stalled(self) -> bool {
        matches!(self, Self::Stalled | Self::StalledAwake)
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Network => "network",
            Self::Tiers => "tiers",
            Self::Streams => "streams",
            Self::Idle => "idle",
            Self::IdleTiers => "idle-tiers",
            Self::Killed => "killed",
            Self::Stopped => "stopped",
            Self::Stalled => "stalled",
            Self::StalledAwake => "stalled-awake",
        })
    }
}

impl FromStr for Scenario {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|scenario| scenario.to_string() == text).ok_or(())
    }
}

/// One rank of a scenario.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    let scenario: Scenario = parent.value("SCENARIO")?;
    let (rank, ranks) = (Rank(parent.value("RANK")?), parent.value("RANKS")?);
    let nodes: String = parent.value("NODES")?;
    let nodes: Vec<u32> = nodes.split(',').filter_map(|node| node.parse().ok()).collect();
    let topology = Topology::of_nodes(&nodes).map_err(unexpected)?;
    let hub: String = parent.value("HUB")?;
    let secret = Secret::new(&parent.value::<String>("SECRET")?).map_err(unexpected)?;
    let environment = Environment { secret: Some(secret), ..Environment::at_hub(hub, rank, ranks) };
    let bootstrap =
        TcpBootstrap::join(&environment, Deadline::after(TIMEOUT)).map_err(unexpected)?;
    if scenario.is_stalled() {
        let device = DeviceChoice::Name(parent.value("DEVICE")?);
        let options = stopped::options(Options { device, ..Options::default() });
        let network = peerlane_rdma::Fabric::open_with(rank, ranks, options)?;
        let waits = if scenario == Scenario::Stalled { Waits::Asleep } else { Waits::Awake };
        return stopped::run_rank(parent, &bootstrap, network, waits);
    }

    let network = open_network(parent, rank, ranks)?;
    let group = GroupOptions::default().timeout(TIMEOUT).topology(topology);
    match scenario {
        Scenario::Network => {
            gathers(parent, group.open(bootstrap, network).map_err(unexpected)?, false)
        }
        Scenario::Tiers => {
            let local = host::Fabric::open(rank, ranks)?;
            gathers(parent, group.open_tiers(bootstrap, local, network).map_err(unexpected)?, true)
        }
        Scenario::Streams => {
            let local = host::Fabric::open(rank, ranks)?;
            let local = Wrapped::new(local, StreamLayer::default());
            streams(parent, group.open_tiers(bootstrap, local, network).map_err(unexpected)?)
        }
        Scenario::Idle => waits(parent, group.open(bootstrap, network).map_err(unexpected)?),
        Scenario::IdleTiers => {
            let local = host::Fabric::open(rank, ranks)?;
            waits(parent, group.open_tiers(bootstrap, local, network).map_err(unexpected)?)
        }
        Scenario::Killed | Scenario::Stopped => {
            deserted(parent, scenario, group.open(bootstrap, network).map_err(unexpected)?)
        }
        Scenario::Stalled | Scenario::StalledAwake => unreachable!("it has no group"),
    }
}

/// Every algorithm that a group with or without a network tier can run, with blocks of all sizes, several starts each.
fn gathers(parent: &Parent, mut group: Group, tiers: bool) -> Outcome {
    let (me, ranks) = (parent.value::<usize>("RANK")?, parent.value::<usize>("RANKS")?);
    let mut round = 0;
    let topology = Topology::flat(ranks).map_err(unexpected)?;
    let shape = Shape { tiers, ..Shape::default() };
    let known: Vec<Algorithm> = schedule::fitting(group.topology(), shape).collect();
    let of_ranks = schedule::fitting(&topology, Shape::default());
    for algorithm in of_ranks.filter(|algorithm| known.contains(algorithm)) {
        for bytes in BLOCK_BYTES {
            let builder = group.all_gather::<u8>(bytes).algorithm(algorithm).outputs(2);
            let mut gather = builder.prepare().map_err(unexpected)?;
            for _ in 0..STARTS {
                round += 1;
                let place = gather.input_mut().map_err(unexpected)?;
                place.copy_from_slice(&block(me, round, bytes));
                let what = || format!("{algorithm}, {bytes} bytes, start {round}");
                gather.run().map_err(|error| unexpected(error).within(what()))?;
                let seen = gather.output().map_err(unexpected)?;
                for (rank, seen) in seen.chunks(bytes).enumerate().take(ranks) {
                    if seen != block(rank, round, bytes) {
                        let what = what();
                        return Err(Failure::new(format!("{what}: wrong block of rank {rank}")));
                    }
                }
            }
        }
        parent.print_line(format_args!("passed {algorithm}"));
    }
    group.close().map_err(unexpected)?;
    parent.print_line("done");
    Ok(())
}

/// Starts that nobody waits for, and replays: a thread drives the lanes over the network.
fn streams(parent: &Parent, mut group: Group) -> Outcome {
    let (me, ranks) = (parent.value::<usize>("RANK")?, parent.value::<usize>("RANKS")?);
    let algorithms =
        [Algorithm::Direct, Algorithm::Ring, Algorithm::Hierarchical, Algorithm::HierarchicalRing];
    for algorithm in algorithms {
        let builder = group.all_gather::<u8>(BLOCK_BYTES[1]).algorithm(algorithm);
        // SAFETY: the stream is idle before the operation is dropped, and the host borrows nothing.
        let mut gather = unsafe { builder.capturable() }.prepare().map_err(unexpected)?;
        let (stream, rounds) = (Stream::new(), Rounds::new(me, ranks, BLOCK_BYTES[1]));
        for _ in 0..STARTS {
            rounds.fill(&stream, gather.input_memory().unwrap());
            let lease = gather.start_on(&stream).map_err(unexpected)?;
            rounds.look(&stream, lease.output());
        }
        stream.begin_capture();
        rounds.fill(&stream, gather.input_memory().unwrap());
        let lease = gather.start_on(&stream).map_err(unexpected)?;
        rounds.look(&stream, lease.output());
        let graph = stream.end_capture();
        for _ in 0..STARTS {
            graph.replay(&stream);
        }
        if !stream.is_idle_within(TIMEOUT) {
            return Err(Failure::new(format!("{algorithm}: the stream is blocked")));
        }
        if rounds.right() != 2 * STARTS {
            let right = rounds.right();
            return Err(Failure::new(format!("{algorithm}: {right} rounds of {}", 2 * STARTS)));
        }
        // The least of several times: on a loaded machine, one of them may count other work.
        let used = (0..ARMED_TIMES).map(|_| {
            let (begun, before) = (Instant::now(), processor_time());
            std::thread::sleep(ARMED);
            100.0 * (processor_time() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
        });
        let used = used.fold(f64::INFINITY, f64::min);
        parent.print_line(format_args!(
            "figure rank {me}: at least {used:.1} % of a processor while {algorithm} is armed"
        ));
        if used > IDLE_MAX {
            return Err(Failure::new(format!(
                "{algorithm}: it used {used} % or more in each of {ARMED_TIMES} times without work"
            )));
        }
        // All replays are over on all ranks before anyone lets go.
        group.barrier().map_err(unexpected)?;
        parent.print_line(format_args!("passed {algorithm} on a stream"));
    }
    group.close().map_err(unexpected)?;
    parent.print_line("done");
    Ok(())
}

/// Checks that a rank gives its processor away while a peer is late, and prints what it uses.
///
/// A start also takes processor time that has nothing to do with the wait, more on a slower machine. So the most that a start
/// among ranks in time takes is not counted as part of the wait.
fn waits(parent: &Parent, mut group: Group) -> Outcome {
    let me: usize = parent.value("RANK")?;
    let builder = group.all_gather::<u8>(IDLE_BLOCK_BYTES);
    let mut gather = builder.prepare().map_err(unexpected)?;
    gather.run().map_err(unexpected)?;
    let mut run = || -> Outcome<(Duration, Duration)> {
        let (begun, before) = (Instant::now(), processor_time());
        gather.run().map_err(unexpected)?;
        Ok((processor_time() - before, begun.elapsed()))
    };

    let mut busy = Duration::ZERO;
    for _ in 0..BUSY_STARTS {
        let (used, _) = run()?;
        busy = busy.max(used);
    }

    // The longest of all ranks, because rank 0 is late for all of them.
    let busiest = group.exchange(&(busy.as_nanos() as u64).to_le_bytes()).map_err(unexpected)?;
    let busiest =
        busiest.iter().filter_map(|nanos| Some(u64::from_le_bytes(nanos[..].try_into().ok()?)));
    let busiest = Duration::from_nanos(busiest.max().unwrap_or_default());
    let late = LATE.max(busiest * LATE_IN_STARTS);
    let (mut idle, mut waited) = (f64::INFINITY, Duration::ZERO);
    for _ in 0..LATE_STARTS {
        if me == 0 {
            std::thread::sleep(late);
        }
        let (used, took) = run()?;
        let percent = 100.0 * used.saturating_sub(busy).as_secs_f64() / took.as_secs_f64();
        (idle, waited) = (idle.min(percent), waited.max(took));
    }

    if me != 0 {
        parent.print_line(format_args!(
            "figure rank {me}: at least {idle:.1} % of a processor while it waits up to {waited:.1?}, beside \
             {busy:.1?} for a start"
        ));
        if waited < late / 2 || idle > WAITING_MAX {
            return Err(Failure::new(format!(
                "it used {idle} % or more in each of {LATE_STARTS} waits, the longest of {waited:?}, beside {busy:?} \
                 for a start"
            )));
        }
    }
    group.close().map_err(unexpected)?;
    parent.print_line("done");
    Ok(())
}

/// What all threads of this process have used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Gathers until a peer is gone; that is an error, and soon.
fn deserted(parent: &Parent, scenario: Scenario, mut group: Group) -> Outcome {
    let ranks: usize = parent.value("RANKS")?;
    let known: &[ErrorKind] = match scenario {
        Scenario::Stopped => &[ErrorKind::Timeout],
        _ => &[ErrorKind::PeerLost, ErrorKind::Aborted],
    };
    let victim = format!("rank {}", ranks - 1);
    let builder = group.all_gather::<u8>(300_000).algorithm(Algorithm::Direct);
    // Only the starts have the short timeout. The group is opened and the operation prepared before anyone is stopped.
    let timeout = if scenario == Scenario::Stopped { STOPPED_TIMEOUT } else { TIMEOUT };
    let mut gather = builder.timeout(timeout).prepare().map_err(unexpected)?;
    let start = Instant::now();
    loop {
        let begun = Instant::now();
        match gather.run() {
            Ok(()) => {}
            Err(error) => {
                let (kind, text, took) = (error.kind(), error.to_string(), begun.elapsed());
                if !known.contains(&kind) || !text.contains(&victim) || took > LOST_WITHIN {
                    return Err(Failure::new(format!("after {took:?}: {text} ({kind})")));
                }
                parent.print_line(format_args!("passed {text}"));
                parent.print_line("done");
                return Ok(());
            }
        }
        parent.print_line("under way");
        if start.elapsed() > TIMEOUT {
            return Err(Failure::new("nobody was killed or stopped"));
        }
    }
}

/// Returns what `rank` contributes in `round`.
pub(crate) fn block(rank: usize, round: u64, bytes: usize) -> Vec<u8> {
    pattern((rank as u64 + 1) << 32 | round, bytes as u64)
}

/// Describes an error where none was due.
pub(crate) fn unexpected(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}
