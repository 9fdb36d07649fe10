//! Runs one case from the side of the test that starts the ranks.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use peerlane_collectives::bootstrap::tcp;
use peerlane_collectives::error::Error;
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, Rank};
use peerlane_test_support::{Elapsed, ReservedPort, Stopwatch};
use peerlane_tests::processes::{Child, named_files};
use peerlane_tests::{Failure, Outcome};

/// The timeout of a call whose victim is killed, and of the calls before: nobody may wait that long.
const KILLED_TIMEOUT: Duration = Duration::from_secs(20);
/// The timeout of a call whose victim never comes, or is stopped: all wait so long.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long after the end of the victim's process a rank may return, or may have shrunk the group.
const KILLED_GRACE: Duration = Duration::from_secs(1);
/// How much later than its deadline a rank may return.
const STOPPED_GRACE: Duration = Duration::from_millis(500);
/// A survivor that has said that it goes into a call is in it by then.
const SETTLING: Duration = Duration::from_millis(30);

/// Where the victim is when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    BeforeJoin,
    Joined,
    Connecting,
    Opened,
    Preparing,
    Importing,
    Prepared,
    Ready,
    Arrived,
    Pushing,
    BetweenStarts,
    Messages,
    Closing,
    Leaving,
}

impl Phase {
    pub(crate) const ALL: [Self; 14] = [
        Self::BeforeJoin,
        Self::Joined,
        Self::Connecting,
        Self::Opened,
        Self::Preparing,
        Self::Importing,
        Self::Prepared,
        Self::Ready,
        Self::Arrived,
        Self::Pushing,
        Self::BetweenStarts,
        Self::Messages,
        Self::Closing,
        Self::Leaving,
    ];

    /// An engine of the host copies 8 MiB in each look at it. A start looks once, so that the
    /// victim's first push is not over; a poll looks once more.
    fn block_bytes(self) -> usize {
        match self {
            Self::Ready | Self::Arrived => 12 << 20,
            Self::Pushing => 20 << 20,
            _ => 1000,
        }
    }

    /// The call in which the others are.
    fn others_are_in(self) -> &'static str {
        match self {
            Self::BeforeJoin => "join",
            Self::Joined | Self::Connecting => "open",
            Self::Opened | Self::Preparing | Self::Importing => "prepare",
            Self::Prepared | Self::Ready | Self::Arrived | Self::Pushing => "start 1",
            Self::BetweenStarts => "start 2",
            Self::Messages => "messages",
            Self::Closing | Self::Leaving => "close",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for Phase {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|phase| phase.to_string() == text).ok_or(())
    }
}

/// Who runs the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hub {
    RankZero,
    Parent,
}

/// What happens to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Killed,
    Stopped,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) ranks: usize,
    pub(crate) victim: usize,
    pub(crate) phase: Phase,
    pub(crate) hub: Hub,
    pub(crate) end: End,
    /// The nodes, where there is a second fabric between them.
    pub(crate) nodes: Option<&'static str>,
    /// Whether the ranks form a ring, in which most ranks wait for a rank that waits itself.
    pub(crate) ring: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, victim, phase, hub, end, nodes, ring } = self;
        write!(f, "{end:?}::{phase}::rank_{victim}_of_{ranks}::hub_in_{hub:?}")?;
        nodes.iter().try_for_each(|nodes| write!(f, "::nodes_{nodes}"))?;
        if *ring { f.write_str("::ring") } else { Ok(()) }
    }
}

/// How a survivor's story ended, in its own words.
struct Fate {
    rank: usize,
    after: Elapsed,
    words: String,
}

impl Case {
    pub(crate) fn run(self) -> Outcome {
        let files = named_files();
        let hub = match self.hub {
            Hub::Parent => Some(tcp::Hub::bind("127.0.0.1:0", self.ranks).map_err(refused)?),
            Hub::RankZero => None,
        };
        let mut children = self.start(hub.as_ref())?;
        self.gather_around_victim(&mut children)?;
        match self.end {
            End::Killed => children[self.victim].kill()?,
            End::Stopped => children[self.victim].stop()?,
        }

        let watch = self.watch(&children);
        let mut fates = Vec::new();
        for rank in self.survivors() {
            let words = children[rank].read_line(patience())?;
            fates.push(Fate { rank, after: watch.elapsed(), words });
        }
        self.judge(&fates)?;
        self.expect_shrunk(&mut children)?;
        self.gather_again(&mut children)?;
        drop(children);
        check(named_files() == files, || format!("files are left behind: {:?}", named_files()))
    }

    fn survivors(self) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |rank| *rank != self.victim)
    }

    /// Starts to measure how long something takes the survivors.
    fn watch(self, children: &[Child]) -> Stopwatch {
        Stopwatch::start_with(self.survivors().map(|rank| children[rank].id()))
    }

    /// Returns the timeout of these calls, which is short only if the others wait in one of them in vain.
    fn timeout_of(self, calls: &[&str]) -> Duration {
        let is_short = self.all_wait_in_vain() && calls.contains(&self.phase.others_are_in());
        if is_short { SHORT_TIMEOUT } else { KILLED_TIMEOUT }
    }

    /// Returns the timeout of the group, with which operations are prepared.
    fn timeout(self) -> Duration {
        self.timeout_of(&["prepare"])
    }

    /// Returns the timeout of a start. Preparing its operation may take as long as the longer of this and that of the group.
    fn start_timeout(self) -> Duration {
        self.timeout_of(&["prepare", "start 1", "start 2"])
    }

    /// Whether no connection closes, so that only the deadline tells.
    fn all_wait_in_vain(self) -> bool {
        self.end == End::Stopped || self.phase == Phase::BeforeJoin
    }

    /// Whether the survivors have a group, and enough time to find each other.
    fn shrinks(self) -> bool {
        let has_group = !matches!(self.phase.others_are_in(), "join" | "open" | "close");
        has_group && self.timeout() == KILLED_TIMEOUT
    }

    fn takes_the_hub(self) -> bool {
        self.victim == 0 && self.hub == Hub::RankZero
    }

    /// Starts all ranks and tells them where the hub is.
    fn start(self, hub: Option<&tcp::Hub>) -> Outcome<Vec<Child>> {
        let mut children = Vec::new();
        // Rank 0 ends before it opens the hub.
        let is_deserted = hub.is_none() && self.takes_the_hub() && self.phase == Phase::BeforeJoin;
        let deserted = is_deserted.then(ReservedPort::new);
        let address =
            hub.map(tcp::Hub::address).or_else(|| deserted.as_ref().map(ReservedPort::address));
        for rank in 0..self.ranks {
            let phase =
                if rank == self.victim { self.phase.to_string() } else { "none".to_owned() };
            let values = [
                ("RANK", rank.to_string()),
                ("RANKS", self.ranks.to_string()),
                ("PHASE", phase),
                ("NODES", self.nodes.unwrap_or("none").to_owned()),
                ("RING", self.ring.to_string()),
                ("SHRINKS", self.shrinks().to_string()),
                ("BLOCK_BYTES", self.phase.block_bytes().to_string()),
                ("HUB", if address.is_none() && rank == 0 { "own" } else { "told" }.to_owned()),
                ("JOIN_TIMEOUT_MILLIS", millis(self.timeout_of(&["join"]))),
                ("OPEN_TIMEOUT_MILLIS", millis(self.timeout_of(&["open"]))),
                ("TIMEOUT_MILLIS", millis(self.timeout())),
                ("START_TIMEOUT_MILLIS", millis(self.start_timeout())),
            ];
            children.push(Child::start("rank", &values)?);
        }
        let (address, told) = match address {
            Some(address) => (address.to_string(), &mut children[..]),
            None => (children[0].expect("hub", patience())?, &mut children[1..]),
        };
        told.iter_mut().try_for_each(|child| child.send_line(&address))?;
        Ok(children)
    }

    /// Returns when the victim is where it is to end, and all others wait for it.
    fn gather_around_victim(self, children: &mut [Child]) -> Outcome {
        let victim = &mut children[self.victim];
        match self.phase {
            Phase::Pushing => victim.read_until("at ready", patience())?,
            phase => victim.read_until(&format!("at {phase}"), patience())?,
        }
        let step = format!("step {}", self.phase.others_are_in());
        for rank in self.survivors() {
            children[rank].read_until(&step, patience())?;
        }
        std::thread::sleep(SETTLING);
        if self.phase == Phase::Pushing {
            children[self.victim].send_line("push")?;
            children[self.victim].read_until("at Pushing", patience())?;
        }
        Ok(())
    }

    fn judge(self, fates: &[Fate]) -> Outcome {
        let (victim, step) = (Rank::at(self.victim), self.phase.others_are_in());
        let late = self.all_wait_in_vain();
        let kind = if late { "timeout" } else { "peer lost" };
        let limit = if late { SHORT_TIMEOUT + STOPPED_GRACE } else { KILLED_GRACE };
        for Fate { rank, after, words } in fates {
            check(after.is_within(limit), || {
                format!("rank {rank} took {after}, expected {limit:?}: {words}")
            })?;
            // A goodbye needs nobody: the group was over before.
            let wanted = match self.phase {
                Phase::Leaving => "ended".to_owned(),
                _ => format!("fell in {step}: {kind}, rank {victim}: "),
            };
            check(words.starts_with(&wanted), || {
                format!("rank {rank} {words:?}, expected {wanted:?}")
            })?;
        }
        let record =
            |fate: &Fate| fate.words.split_once("; record ").map(|(_, record)| record.to_owned());
        let first = record(&fates[0]);
        let differing = fates.iter().find(|fate| record(fate) != first);
        check(differing.is_none(), || {
            let words: Vec<_> = fates.iter().map(|fate| &fate.words).collect();
            format!("the records differ: {words:#?}")
        })
    }

    /// The survivors have shrunk the group at once, and gathered.
    fn expect_shrunk(self, children: &mut [Child]) -> Outcome {
        if !self.shrinks() {
            return Ok(());
        }
        let watch = self.watch(children);
        let topology: Option<Topology> = self.nodes.and_then(|nodes| nodes.parse().ok());
        let node = |rank| topology.as_ref().map_or(0, |topology| topology.node(Rank::at(rank)));
        let nodes: BTreeSet<_> = self.survivors().map(node).collect();
        let (ranks, nodes) = (self.survivors().count(), nodes.len());
        for (rank, survivor) in self.survivors().enumerate() {
            let said = children[survivor].expect("shrunk", patience())?;
            let expected = format!("to rank {rank} of {ranks} on {nodes} nodes");
            check(said == expected, || {
                format!("rank {survivor} shrunk {said}, expected {expected}")
            })?;
        }

        let took = watch.elapsed();
        check(took.is_within(KILLED_GRACE), || {
            format!("shrinking took {took}, expected {KILLED_GRACE:?}")
        })
    }

    /// Those who are left find each other again, gather, and are clean.
    fn gather_again(self, children: &mut [Child]) -> Outcome {
        let ranks = self.survivors().count();
        let hub = tcp::Hub::bind("127.0.0.1:0", ranks).map_err(refused)?;
        for (rank, survivor) in self.survivors().enumerate() {
            children[survivor].expect("clean", patience())?;
            children[survivor].send_line(format_args!("{} {rank} {ranks}", hub.address()))?;
        }
        for survivor in self.survivors() {
            children[survivor].expect("gathered again", patience())?;
            children[survivor].finish(patience())?;
        }
        Ok(())
    }
}

/// A bound for what no case waits for on purpose.
pub(crate) fn patience() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn millis(timeout: Duration) -> String {
    timeout.as_millis().to_string()
}

pub(crate) fn refused(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}

pub(crate) fn check(holds: bool, text: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(Failure::new(text())) }
}
