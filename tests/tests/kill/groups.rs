//! Kills one of four ranks, which run all-gathers in six groups in turn. The groups that contain the killed rank end, and the
//! others go on.

use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_test_support::{Elapsed, Stopwatch};
use peerlane_tests::processes::{Child, Parent, leftovers, named_files};
use peerlane_tests::{Failure, Outcome};

use crate::case::{check, patience, refused};

/// The role of a rank of these groups.
pub(crate) const ROLE: &str = "rank in groups";
const RANKS: usize = 4;
/// The groups that are split from the world, by their ranks; those of one line are split at once.
const SPLITS: [&[&[u32]]; 3] = [&[&[0, 1], &[2, 3]], &[&[0, 2], &[1, 3]], &[&[0, 1, 2]]];
const LEN: usize = 1000;
/// The number of all-gathers that a survivor runs in each remaining group.
const ROUNDS_AFTER: u32 = 20;
/// The number of ranks that are killed, one after the other.
const KILLS: usize = 50;
/// The time from the end of the victim's process until all survivors have the ends of all groups that hold it, for nine of
/// ten kills. A busy or slow machine can delay single ones.
const LIMIT: Duration = Duration::from_millis(100);

/// Kills ranks in turn, at any time.
pub(crate) fn run() -> Outcome {
    let files = named_files();
    let mut random = fastrand::Rng::with_seed(34);
    let mut times = Vec::new();
    for number in 0..KILLS {
        let delay = Duration::from_micros(random.u64(..10_000));
        let time = kill(number % RANKS, delay);
        times.push(time.map_err(|failure| failure.within(format!("kill {number}")))?);
    }

    times.sort_by_key(|time| time.net());
    let (median, longest) = (times[KILLS / 2], times[KILLS - 1]);
    println!("{KILLS} kills: all ends after {median} in the median, {longest} at most");
    check(times[KILLS * 9 / 10].net() < LIMIT, || format!("{times:?}, expected {LIMIT:?}"))?;
    check(named_files() == files, || format!("files are left behind: {:?}", named_files()))
}

fn kill(victim: usize, delay: Duration) -> Outcome<Elapsed> {
    let hub = Hub::bind("127.0.0.1:0", RANKS).map_err(refused)?;
    let start = |rank: usize| {
        let values = [("RANK", rank), ("VICTIM", victim)].map(|(name, it)| (name, it.to_string()));
        let address = ("HUB", hub.address().to_string());
        Child::start(ROLE, &[&values[..], &[address]].concat())
    };
    let mut children = (0..RANKS).map(start).collect::<Outcome<Vec<_>>>()?;
    for child in &mut children {
        child.expect("gathers", patience())?;
    }
    std::thread::sleep(delay);
    children[victim].kill()?;
    children.remove(victim);

    let watch = Stopwatch::start_with(children.iter().map(Child::id));
    for child in &mut children {
        child.expect("groups have ended", patience())?;
    }
    let time = watch.elapsed();
    children.iter_mut().try_for_each(|child| child.finish(patience()))?;
    Ok(time)
}

/// A group that this rank is in.
struct Member {
    ranks: &'static [u32],
    group: Group,
    gather: Operation<u32>,
    rounds: u32,
    goes_on: bool,
}

/// Gathers until the groups that hold the victim have ended, and then in the others.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    let (rank, victim) = (Rank(parent.value("RANK")?), Rank(parent.value("VICTIM")?));
    let environment = Environment::at_hub(parent.value::<String>("HUB")?, rank, RANKS);
    let bootstrap = TcpBootstrap::join(&environment, patience()).map_err(refused)?;
    let fabric = host::Fabric::open(rank, RANKS)?;
    let mut world = Group::open(bootstrap, fabric).map_err(refused)?;
    let mut members = Vec::new();
    for groups in SPLITS {
        let color = (0..).zip(groups).find(|(_, ranks)| ranks.contains(&rank.0));
        let group = world.split(color.map(|(color, _)| color), 0).map_err(refused)?;
        if let (Some(group), Some((_, ranks))) = (group, color) {
            members.push(Member::new(ranks, group)?);
        }
    }
    // Dropped last: the other groups end with it.
    members.push(Member::new(&[0, 1, 2, 3], world)?);
    let mut rounds_after = 0;
    while members.iter().any(|member| member.goes_on) {
        for member in members.iter_mut().filter(|member| member.goes_on) {
            match member.gather(rank, rounds_after > ROUNDS_AFTER) {
                Ok(goes_on) => member.goes_on = goes_on?,
                Err(error) => member.check_end(&error, victim)?,
            }
        }
        if members.iter().all(|member| member.goes_on) {
            if members[0].rounds == 1 {
                parent.print_line("gathers");
            }
        } else if !members.iter().any(|it| it.goes_on && it.ranks.contains(&victim.0)) {
            if rounds_after == 0 {
                parent.print_line("groups have ended");
            }
            rounds_after += 1;
        }
    }
    for member in members.extract_if(.., |member| !member.ranks.contains(&victim.0)) {
        drop(member.gather);
        member.group.close().map_err(refused)?;
    }
    drop(members);
    let left = leftovers();
    check(left.is_empty(), || format!("left {left:?}"))
}

impl Member {
    fn new(ranks: &'static [u32], mut group: Group) -> Outcome<Self> {
        let gather = group.all_gather(LEN).prepare().map_err(refused)?;
        Ok(Self { ranks, group, gather, rounds: 0, goes_on: true })
    }

    /// Gathers once, and returns whether a rank of the group goes on.
    fn gather(&mut self, rank: Rank, stops: bool) -> Result<Outcome<bool>, Error> {
        self.rounds += 1;
        let value = |rank, stops| (self.rounds * 4 + rank) * 2 + u32::from(stops);
        self.gather.input_mut()?.fill(value(rank.0, stops));
        self.gather.run()?;
        let output = self.gather.output()?;
        let mut goes_on = false;
        for (block, rank) in output.chunks(LEN).zip(self.ranks) {
            let is = |stops| block.iter().all(|found| *found == value(*rank, stops));
            goes_on |= is(false);
            if !is(false) && !is(true) {
                let text = format!("the block of rank {rank} is wrong in {:?}", self.ranks);
                return Ok(Err(Failure::new(text)));
            }
        }
        Ok(Ok(goes_on))
    }

    /// Only a group that holds the victim ends, and says so by the victim's number in it.
    fn check_end(&mut self, error: &Error, victim: Rank) -> Outcome {
        self.goes_on = false;
        let record = self.group.abort_record().and_then(|record| record.peer);
        let found = (error.kind(), error.peer(), record);
        let peer = self.ranks.iter().position(|rank| *rank == victim.0).map(Rank::at);
        check(peer.is_some() && found == (ErrorKind::PeerLost, peer, peer), || {
            format!("the group {:?} ended with {found:?}: {error}", self.ranks)
        })
    }
}
