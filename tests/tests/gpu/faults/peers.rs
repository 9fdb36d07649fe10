//! Kills or leaves out peers while starts are on streams. The other ranks must name the missing
//! one, their streams must go on, and they must gather again without it.

use std::fmt;
use std::time::Duration;

use peerlane_test_support::Stopwatch;
use peerlane_tests::processes::Child;
use peerlane_tests::{Failure, GpuDriver, Outcome};

use super::Fault;
use super::processes::{finish, patience, ranks, says};
use super::survivor::Phase;
use crate::driver::MAX_CONNECTIONS;
use crate::support::data::check;
use crate::vendor::{ENGINES, FUSED, REDUCES, shows_all};

/// The kind that takes streams.
const STREAMS: &str = "streams";
/// A survivor that has said that it waits is waiting by then.
const SETTLING: Duration = Duration::from_millis(100);
/// The timeout of a start to which a peer never comes.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);
const LONG_TIMEOUT: Duration = Duration::from_secs(20);
/// How much longer than the work on its stream a survivor may take to return after a kill.
const KILLED_GRACE: Duration = Duration::from_secs(1);
/// The same after the deadline of a start.
const LATE_GRACE: Duration = Duration::from_millis(500);
/// The same after the deadline of a replay, which counts from the first look that finds it waiting. Each of its waits is
/// then released by another look.
const LATE_REPLAY_GRACE: Duration = Duration::from_secs(1);

/// How long the replays of an ended group may take on a GPU. The simulated driver counts their waits instead, because
/// their time there is the processor time of copies without optimization.
const REPLAYS_MAX: Duration = Duration::from_millis(2400);

/// What happens to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    /// It lives, and does nothing.
    Silent,
    /// It does not even hear that the group is over.
    Stopped,
}

#[derive(Clone, Copy, Debug)]
struct Loss {
    ranks: usize,
    victim: usize,
    phase: Phase,
    end: End,
    /// The kind of engines.
    engine: &'static str,
    /// Number of hardware queues that the streams of a rank share; by default each has its own, or the driver decides.
    connections: Option<u32>,
    /// Whether the ranks add.
    reduces: bool,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, victim, phase, end, engine, connections, reduces } = self;
        write!(f, "peer_lost::{end:?}::{phase}::rank_{victim}_of_{ranks}")?;
        if let Some(connections) = connections {
            write!(f, "::connections_{connections}")?;
        }
        if *reduces {
            write!(f, "::all_reduce")?;
        }
        if *engine == STREAMS { Ok(()) } else { write!(f, "::{engine}") }
    }
}

pub(crate) fn faults(driver: GpuDriver) -> Vec<Fault> {
    let killed = |ranks, victim, phase| {
        let (end, engine) = (End::Killed, STREAMS);
        Loss { ranks, victim, phase, end, engine, connections: None, reduces: false }
    };
    let mut losses: Vec<Loss> = Phase::ALL.map(|phase| killed(3, 1, phase)).into();
    let waiting = [
        killed(3, 1, Phase::BeforeItStarts),
        killed(3, 1, Phase::HostWaits),
        killed(3, 1, Phase::Replayed),
        killed(3, 1, Phase::BesideADrop),
        killed(2, 0, Phase::ReplayedMany),
        killed(2, 0, Phase::DroppedReplays),
    ];
    if shows_all(driver, STREAMS) {
        losses.push(killed(3, 0, Phase::WhileItPushes));
        losses.push(killed(2, 0, Phase::ReplayedMany));
        for phase in [Phase::BeforeItStarts, Phase::WhileItPushes, Phase::Replayed] {
            losses.extend([killed(2, 1, phase), killed(4, 2, phase)]);
        }
        for end in [End::Silent, End::Stopped] {
            losses.extend(waiting.map(|loss| Loss { end, ..loss }));
        }
    } else {
        // Streams are released alike whether a peer is silent or stopped.
        let ends = [End::Silent, End::Stopped].into_iter().cycle();
        losses.extend(waiting.into_iter().zip(ends).map(|(loss, end)| Loss { end, ..loss }));
    }
    // A blocked stream blocks others of its context.
    for connections in MAX_CONNECTIONS.iter().copied() {
        let few = |loss| Loss { connections: Some(connections), ..loss };
        losses.extend(
            [Phase::BeforeItStarts, Phase::ReplayedMany].map(|phase| few(killed(2, 1, phase))),
        );
        losses.push(few(Loss { end: End::Stopped, ..killed(2, 0, Phase::DroppedReplays) }));
    }
    if REDUCES {
        let phases =
            [Phase::BeforeItStarts, Phase::HostWaits, Phase::WhileItPushes, Phase::ReplayedMany];
        let killed = phases.map(|phase| Loss { reduces: true, ..killed(2, 1, phase) });
        let silent = killed.iter().filter(|loss| loss.phase != Phase::WhileItPushes);
        let silent: Vec<_> = silent.map(|loss| Loss { end: End::Silent, ..*loss }).collect();
        losses.extend(killed.into_iter().chain(silent));
    }
    // Launches poll flags and tagged data, eager, in graphs and queued.
    if let Some(engine) = FUSED {
        let lost = |end, ranks, victim, phase| Loss { end, engine, ..killed(ranks, victim, phase) };
        losses.extend([
            lost(End::Killed, 3, 1, Phase::WhileItPushes),
            lost(End::Killed, 2, 0, Phase::ReplayedMany),
            lost(End::Silent, 3, 1, Phase::BeforeItStarts),
            lost(End::Stopped, 2, 1, Phase::DroppedReplays),
            Loss { reduces: true, ..lost(End::Silent, 2, 1, Phase::Replayed) },
            Loss { reduces: true, ..lost(End::Killed, 2, 1, Phase::HostWaits) },
        ]);
    }
    // Engines that the host drives lose peers while the host waits.
    for engine in ENGINES.iter().copied().filter(|engine| *engine != STREAMS) {
        let killed = |ranks, victim, phase| Loss { engine, ..killed(ranks, victim, phase) };
        for phase in [Phase::HostWaits, Phase::WhileItPushes] {
            losses.extend([killed(3, 1, phase), killed(2, 1, phase), killed(4, 0, phase)]);
        }
        for end in [End::Silent, End::Stopped] {
            losses.push(Loss { end, ..killed(3, 1, Phase::HostWaits) });
        }
    }
    let fault = |loss: Loss| Fault::new(loss.to_string(), move |driver| loss.run_rank(driver));
    losses.into_iter().map(fault).collect()
}

impl Loss {
    fn survivors(self) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |rank| *rank != self.victim)
    }

    fn timeout(self) -> Duration {
        if self.end == End::Killed { LONG_TIMEOUT } else { SHORT_TIMEOUT }
    }

    /// Returns how long a survivor may take to return, apart from the work on its stream.
    fn delay_limit(self) -> Duration {
        match self.end {
            End::Killed => KILLED_GRACE,
            End::Silent | End::Stopped if self.phase.is_replayed() => {
                self.timeout() + LATE_REPLAY_GRACE
            }
            End::Silent | End::Stopped => self.timeout() + LATE_GRACE,
        }
    }

    /// Reads how long a survivor took to replay its graphs again, without any wait for the victim.
    ///
    /// The time is part of the limit of the start before, so it must not contain what that start may not wait for.
    fn replay_time(self, driver: GpuDriver, survivor: &mut Child) -> Outcome<Duration> {
        if !matches!(self.phase, Phase::Replayed | Phase::ReplayedMany) {
            return Ok(Duration::ZERO);
        }
        let said = survivor.expect("replayed in", patience())?;
        let numbers: Result<Vec<u64>, _> = said.split(' ').map(str::parse).collect();
        let Ok([total, net, waits]) = numbers.as_deref() else {
            return Err(Failure::new(format!("no times and waits: {said:?}")));
        };

        let (total, net) = (Duration::from_micros(*total), Duration::from_micros(*net));
        check(*waits == 0, || {
            format!("{waits} waits of replays after the end of the group blocked")
        })?;
        check(driver == GpuDriver::Simulated || net < REPLAYS_MAX, || {
            format!(
                "replays took {total:?}, {net:?} without waits for a processor, expected {REPLAYS_MAX:?}"
            )
        })?;
        Ok(total)
    }

    /// The victim ends once all others wait for it.
    fn run_rank(self, driver: GpuDriver) -> Outcome {
        let Self { ranks: count, victim, phase, end, engine, connections, reduces } = self;
        let (_hub, mut children) = ranks(driver, "survive", count, |rank, player| {
            let timeout = self.timeout().as_millis();
            let player = player.value("PHASE", phase).value("TIMEOUT_MILLIS", timeout);
            let player = player.value("VICTIM", rank == victim).value("ENGINE", engine);
            let player = player.value("REDUCES", reduces);
            let player = match connections {
                Some(connections) => player
                    .variable("PEERLANE_SIM_CONNECTIONS", connections.to_string())
                    .variable("CUDA_DEVICE_MAX_CONNECTIONS", connections.to_string()),
                None => player,
            };
            match rank == victim && phase == Phase::WhileItPushes {
                // Its copies are still to run when it is killed.
                true => player.variable("PEERLANE_SIM_COPY_DELAY_US", "30000"),
                false => player,
            }
        })?;
        children[victim].expect("at its place", patience())?;
        for rank in self.survivors() {
            children[rank].expect("waits", patience())?;
        }
        std::thread::sleep(SETTLING);
        match end {
            End::Killed => children[victim].kill()?,
            End::Stopped => children[victim].stop()?,
            End::Silent => {}
        }

        let watch = Stopwatch::start_with(self.survivors().map(|rank| children[rank].id()));
        let mut returns = Vec::new();
        for rank in self.survivors() {
            let text = children[rank].read_line(patience())?;
            returns.push((rank, watch.elapsed(), text));
        }
        for (rank, took, text) in returns {
            let work = self.replay_time(driver, &mut children[rank])?;
            let limit = work + self.delay_limit();
            check(took.net() < limit, || {
                format!(
                    "rank {rank} took {took} and {work:?} for its replays alone, expected {limit:?}: {text}"
                )
            })?;
            self.judge(&format!("rank {rank}"), &text)?;
        }

        if end == End::Silent {
            children[victim].send_line("go on")?;
            let text = children[victim].read_line(patience())?;
            self.judge("the silent rank", &text)?;
            children[victim].finish(patience())?;
        }
        self.expect_shrunk(&mut children)?;
        drop(children.remove(victim));
        finish(children)
    }

    /// Those who are left shrink the group, on the devices that they have.
    fn expect_shrunk(self, children: &mut [Child]) -> Outcome {
        for (place, rank) in self.survivors().enumerate() {
            children[rank].expect("alive", patience())?;
            let said = children[rank].expect("shrunk", patience())?;
            let expected = format!("to rank {place} of {}", self.ranks - 1);
            check(said == expected, || format!("rank {rank} shrunk {said}, expected {expected}"))?;
        }
        Ok(())
    }

    /// Returns whether the first flag of the record is one of the victim, whatever the load of the machine.
    ///
    /// A survivor that cannot read a flag of its device in time counts it and all later ones as missing. The first one can then
    /// be the flag of another survivor.
    fn names_a_flag_of_the_victim(self) -> bool {
        let is_read_by_the_host = self.engine != STREAMS && Some(self.engine) != FUSED;
        is_read_by_the_host || self.ranks == 2
    }

    /// Names the victim, and what was waited for.
    fn judge(self, who: &str, text: &str) -> Outcome {
        let victim = self.victim;
        if self.end == End::Killed {
            let begins = format!("fell in start: peer lost, rank {victim}: ");
            return says(who, text, &begins, &[&format!("rank {victim} is lost")]);
        }
        let begins = format!("fell in start: timeout, rank {victim}: ");
        // Whoever was first has written the record.
        let start = if self.phase.is_replayed() { "a replayed start" } else { "start 1" };
        let names_victim = self.names_a_flag_of_the_victim();
        let awaited = match self.phase.is_replayed() {
            // The flags of fused starts have numbers in graphs, too.
            _ if Some(self.engine) == FUSED && names_victim => format!("from rank {victim}"),
            _ if Some(self.engine) == FUSED => "waited for the flag".to_owned(),
            true => "waited for signals from rank".to_owned(),
            false if names_victim => {
                format!("waited for the flag \"ready from {victim}\" from rank {victim}")
            }
            false => "waited for the flag \"ready from ".to_owned(),
        };
        says(who, text, &begins, &[start, "within 1s", &awaited])
    }
}
