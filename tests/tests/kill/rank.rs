//! Runs one rank of a case, in its own process.

use std::fmt;
use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{AbortRecord, Group, GroupOptions, Operation};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;
use peerlane_tests::processes::{Gated, LEAVE, Parent, leftovers};
use peerlane_tests::{Failure, Outcome};

use crate::case::Phase;

/// The block of the group that the survivors open afterwards.
const AGAIN_BYTES: usize = 1000;

/// Why a rank could not go on, and what its group said.
struct Fall {
    step: &'static str,
    error: Error,
    record: Option<AbortRecord>,
}

impl fmt::Display for Fall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, error, record } = self;
        let peer = error.peer().map_or_else(|| "none".to_owned(), |peer| peer.to_string());
        write!(f, "fell in {step}: {}, rank {peer}: {error}; record {record:?}", error.kind())
    }
}

/// Plays one rank.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    Processes::read(parent)?.live(parent)?;
    let left = leftovers();
    parent.print_line(if left.is_empty() { "clean".to_owned() } else { format!("left {left:?}") });
    again(&parent.read_line()?)?;
    parent.print_line("gathered again");
    Ok(())
}

/// What this rank is.
struct Processes {
    environment: Environment,
    hub: Option<Hub>,
    /// Where it halts to be killed.
    phase: Option<Phase>,
    /// The nodes, where there is a second fabric between them.
    nodes: Option<Topology>,
    ring: bool,
    /// Whether the group shrinks after its end.
    shrinks: bool,
    block_bytes: usize,
    join_timeout: Duration,
    open_timeout: Duration,
    timeout: Duration,
    start_timeout: Duration,
}

impl Processes {
    fn read(parent: &Parent) -> Outcome<Self> {
        let (rank, ranks) = (Rank(parent.value("RANK")?), parent.value("RANKS")?);
        let hub = match parent.value::<String>("HUB")?.as_str() {
            "own" => Some(Hub::bind("127.0.0.1:0", ranks).map_err(unexpected)?),
            _ => None,
        };
        let address = match &hub {
            Some(hub) => {
                parent.print_line(format_args!("hub {}", hub.address()));
                hub.address().to_string()
            }
            None => parent.read_line()?,
        };
        let timeout = |name| parent.value(name).map(Duration::from_millis);
        Ok(Self {
            environment: Environment::at_hub(address, rank, ranks),
            hub,
            phase: parent.value("PHASE").ok(),
            nodes: parent.value("NODES").ok(),
            ring: parent.value("RING")?,
            shrinks: parent.value("SHRINKS")?,
            block_bytes: parent.value("BLOCK_BYTES")?,
            join_timeout: timeout("JOIN_TIMEOUT_MILLIS")?,
            open_timeout: timeout("OPEN_TIMEOUT_MILLIS")?,
            timeout: timeout("TIMEOUT_MILLIS")?,
            start_timeout: timeout("START_TIMEOUT_MILLIS")?,
        })
    }

    /// Halts if this is the place.
    fn reach(&self, parent: &Parent, phase: Phase) -> Outcome {
        if self.phase == Some(phase) { parent.halt(phase) } else { Ok(()) }
    }

    /// A whole life, up to the step at which the group ends; what it ends with is said before
    /// anything is dropped.
    fn live(mut self, parent: &Parent) -> Outcome {
        let step = |step| parent.print_line(format_args!("step {step}"));
        let fell = |step, error, record| {
            parent.print_line(Fall { step, error, record });
            Ok(())
        };
        self.reach(parent, Phase::BeforeJoin)?;
        step("join");
        let bootstrap = match self.join() {
            Ok(bootstrap) => bootstrap,
            Err(error) => return fell("join", error, None),
        };
        self.reach(parent, Phase::Joined)?;
        step("open");
        let mut group = match self.open(bootstrap)? {
            Ok(group) => group,
            Err(error) => return fell("open", error, None),
        };
        self.reach(parent, Phase::Opened)?;
        step("prepare");
        let gather = group.all_gather::<u8>(self.block_bytes).timeout(self.start_timeout);
        let tiered = self.nodes.is_some();
        let gather = match (tiered, self.ring) {
            (true, _) => gather.algorithm(Algorithm::Hierarchical),
            (_, true) => gather.algorithm(Algorithm::Ring),
            _ => gather,
        };
        let mut gather = match gather.in_place().prepare() {
            Ok(gather) => gather,
            Err(error) => {
                is_repeated(&error, group.barrier().err())?;
                fell("prepare", error, group.abort_record())?;
                return self.shrink(parent, &group);
            }
        };
        self.reach(parent, Phase::Prepared)?;
        step("start 1");
        fill(&mut gather, self.environment.rank)?;
        if let Err(error) = self.first_start(parent, &mut gather)? {
            is_final(&mut gather, &mut group, &error)?;
            fell("start 1", error, group.abort_record())?;
            return self.shrink(parent, &group);
        }
        self.reach(parent, Phase::BetweenStarts)?;
        step("start 2");
        if let Err(error) = gather.run() {
            is_final(&mut gather, &mut group, &error)?;
            fell("start 2", error, group.abort_record())?;
            return self.shrink(parent, &group);
        }
        verify(&mut gather, self.environment.ranks)?;
        if let Err(error) = self.messages(parent, &mut group)? {
            is_final(&mut gather, &mut group, &error)?;
            fell("messages", error, group.abort_record())?;
            return self.shrink(parent, &group);
        }
        drop(gather);
        step("close");
        if let Err(error) = group.close() {
            return fell("close", error, None);
        }
        parent.print_line("ended");
        Ok(())
    }

    /// Sends a message to every other rank and waits for one of each.
    fn messages(&self, parent: &Parent, group: &mut Group) -> Outcome<Result<(), Error>> {
        let (me, ranks) = (group.rank(), group.ranks());
        let opened = group.window::<u8>(ranks);
        let opened = opened.and_then(|window| Ok((group.channel(&window, 1)?, window)));
        let (mut channel, _window) = match opened {
            Ok(opened) => opened,
            Err(error) => return Ok(Err(error)),
        };
        self.reach(parent, Phase::Messages)?;
        parent.print_line("step messages");
        let others = || Rank::all(ranks).filter(|peer| *peer != me);
        let at = me.index();
        let mut exchange = || {
            channel.write(at, &[me.0 as u8 + 1])?;
            others().try_for_each(|peer| channel.put_signal(peer, at..at + 1, at, 0).map(drop))?;
            others().try_for_each(|peer| channel.wait(peer, 0, self.timeout).map(drop))?;
            let mut seen = vec![0; ranks];
            channel.read(0, &mut seen)?;
            Ok(seen)
        };
        let seen = exchange();
        let wanted: Vec<_> = (1..=ranks as u8).collect();
        match seen {
            Ok(seen) if seen != wanted => {
                Err(Failure::new(format!("{seen:?} was put here, expected {wanted:?}")))
            }
            seen => Ok(seen.map(drop)),
        }
    }

    /// Goes on with the survivors, while the old group and its operations still exist.
    fn shrink(&self, parent: &Parent, group: &Group) -> Outcome {
        if !self.shrinks {
            return Ok(());
        }
        let shrunk = group.shrink().map_err(unexpected)?;
        let (rank, ranks, nodes) = (shrunk.rank(), shrunk.ranks(), shrunk.topology().nodes());
        gather_and_close(shrunk)?;
        parent.print_line(format_args!("shrunk to rank {rank} of {ranks} on {nodes} nodes"));
        Ok(())
    }

    fn open(&self, bootstrap: TcpBootstrap) -> Outcome<Result<Group, Error>> {
        let fabric = host::Fabric::open(self.environment.rank, self.environment.ranks)?;
        let options =
            GroupOptions::default().timeout(self.timeout).start_timeout(self.open_timeout);
        let bootstrap = self.gate(bootstrap);
        let Some(nodes) = &self.nodes else { return Ok(options.open(bootstrap, fabric)) };
        let network = fabric.second(host::Options::default())?;
        Ok(options.topology(nodes.clone()).open_tiers(bootstrap, fabric, network))
    }

    fn join(&mut self) -> Result<TcpBootstrap, Error> {
        let deadline = Deadline::after(self.join_timeout);
        match self.hub.take() {
            Some(hub) => TcpBootstrap::join_with_hub(hub, deadline),
            None => TcpBootstrap::join(&self.environment, deadline),
        }
    }

    /// Halts inside of calls that exchange.
    fn gate(&self, bootstrap: TcpBootstrap) -> Gated<TcpBootstrap> {
        let label = match self.phase {
            Some(Phase::Connecting) => Some("connect"),
            Some(Phase::Preparing) => Some("all-gather 1"),
            Some(Phase::Importing) => Some("heap, growth 1, import"),
            Some(Phase::Closing) => Some("close"),
            Some(Phase::Leaving) => Some(LEAVE),
            _ => None,
        };
        let phase = self.phase;
        Gated::new(bootstrap, label, move || {
            let parent = Parent::find().expect("this process is a rank");
            let _ = phase.map(|phase| parent.halt(phase));
        })
    }

    fn first_start(
        &self,
        parent: &Parent,
        gather: &mut Operation<u8>,
    ) -> Outcome<Result<(), Error>> {
        let mut started = match gather.start() {
            Ok(started) => started,
            Err(error) => return Ok(Err(error)),
        };
        match self.phase {
            // It has said that it is ready, and none of its pushes is over.
            Some(Phase::Ready) => parent.halt(Phase::Ready)?,
            // By the time that the others rest, all that they push is here.
            Some(Phase::Arrived) => {
                std::thread::sleep(Duration::from_millis(200));
                parent.halt(Phase::Arrived)?;
            }
            Some(Phase::Pushing) => {
                parent.halt("ready")?;
                let done = started.poll().map_err(unexpected)?;
                let place = if done { "the end" } else { "Pushing" };
                parent.halt(place)?;
            }
            _ => {}
        }
        Ok(started.wait())
    }
}

/// After the end of a group, every call says why it ended.
fn is_final(gather: &mut Operation<u8>, group: &mut Group, first: &Error) -> Outcome {
    let later = [gather.run().err(), gather.output().err(), group.barrier().err()];
    later.into_iter().try_for_each(|later| is_repeated(first, later))
}

fn is_repeated(first: &Error, later: Option<Error>) -> Outcome {
    let said = |error: &Error| (error.kind(), error.peer(), error.to_string());
    let (later, wanted) = (later.as_ref().map(said), Some(said(first)));
    if later == wanted {
        return Ok(());
    }
    Err(Failure::new(format!("a later call says {later:?}, expected {wanted:?}")))
}

fn fill(gather: &mut Operation<u8>, rank: Rank) -> Outcome {
    gather
        .input_mut()
        .map_err(unexpected)?
        .iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = pattern(rank, at));
    Ok(())
}

fn verify(gather: &mut Operation<u8>, ranks: usize) -> Outcome {
    let output = gather.output().map_err(unexpected)?;
    let blocks = output.chunks_exact(output.len() / ranks).zip(Rank::all(ranks));
    for (block, rank) in blocks {
        if let Some(at) = (0..block.len()).find(|at| block[*at] != pattern(rank, *at)) {
            return Err(Failure::new(format!("byte {at} of the block of rank {rank} is wrong")));
        }
    }
    Ok(())
}

fn pattern(rank: Rank, at: usize) -> u8 {
    (at as u32 * 31 + rank.0 * 97 + 5) as u8
}

fn unexpected(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}

/// A new group of the survivors, from the parent's `address rank ranks`.
fn again(told: &str) -> Outcome {
    let words: Vec<_> = told.split(' ').collect();
    let [address, rank, ranks] = words[..] else {
        return Err(Failure::new(format!("told {told:?}")));
    };
    let number =
        |text: &str| text.parse::<u32>().map_err(|_| Failure::new(format!("told {text:?}")));
    let (rank, ranks) = (Rank(number(rank)?), Rank(number(ranks)?).index());
    let environment = Environment::at_hub(address, rank, ranks);
    let deadline = Deadline::after(Duration::from_secs(20));
    let bootstrap = TcpBootstrap::join(&environment, deadline).map_err(unexpected)?;
    let fabric = host::Fabric::open(rank, ranks)?;
    gather_and_close(Group::open(bootstrap, fabric).map_err(unexpected)?)
}

fn gather_and_close(mut group: Group) -> Outcome {
    let (rank, ranks) = (group.rank(), group.ranks());
    let mut gather = group.all_gather::<u8>(AGAIN_BYTES).prepare().map_err(unexpected)?;
    for _ in 0..3 {
        fill(&mut gather, rank)?;
        gather.run().map_err(unexpected)?;
        verify(&mut gather, ranks)?;
    }
    drop(gather);
    group.close().map_err(unexpected)
}
