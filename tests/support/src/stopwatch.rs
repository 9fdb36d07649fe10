//! Measures times that a busy machine does not change.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The unit of the times in `/proc/stat`, which all architectures that Rust's standard library supports share.
const TICK: Duration = Duration::from_millis(10);

/// How much longer than its limit something may take in any case.
const TOTAL_EXCESS_MAX: Duration = Duration::from_secs(10);

/// How long reading the waits may take at the start and at the end of a measurement, before it is done again.
const READ_TIME_MAX: Duration = Duration::from_millis(1);

/// How often the waits are read at most at the start and at the end of a measurement.
const READS_MAX: usize = 20;

/// The pause between two looks at the waits.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// How the names of the threads begin that Peerlane, its streams of the host and the simulated driver start.
const PRODUCT_NAMES: [&str; 3] = ["peerlane", "stream", "sim-"];

/// Measures how long something takes, and how long its threads waited for a processor meanwhile.
///
/// A bound on the [net](Elapsed::net) time is as strict as the machine is idle: there, hardly any thread waits for a
/// processor, and nothing is subtracted. On a busy machine, more is subtracted than what delayed the result, so the net
/// time is too short rather than too long.
///
/// Ranks can be threads of this process, and each can wait for the one before, so their waits are added. The threads that
/// count are those of the test, which have the name of the thread that starts the measurement unless they are given
/// another, and those of Peerlane and of the simulated driver, also those of other tests that run at the same time: beside
/// them a bound is looser, so that `cargo xtask test` runs programs with such bounds one test at a time. Of each other
/// process, the thread that waited longest counts: one at a time works towards the result, and the others poll.
///
/// Three things are not subtracted: processor time, such as that of a program without optimization; the last waits of
/// threads that have ended, since a thread looks at the waits only now and then; and anything on kernels without
/// `/proc/PID/task/TID/schedstat`.
#[derive(Debug)]
pub struct Stopwatch {
    tally: Arc<Mutex<Tally>>,
    begun: Instant,
    /// Ends the thread that looks when it is dropped.
    _looks: Sender<()>,
}

impl Stopwatch {
    /// Starts to measure something that this process does alone.
    pub fn start() -> Self {
        Self::start_with([])
    }

    /// Starts to measure something that this process does together with the processes that have these numbers.
    pub fn start_with(others: impl IntoIterator<Item = u32>) -> Self {
        let others = Vec::from_iter(others);
        // The clock is read after the waits, and in `elapsed` before them: a wait beside the reads is subtracted without
        // being measured, which makes the net time too short, and not too long.
        let (tally, begun) = shortest_read(|| {
            let tally = Tally::new(others.iter().copied());
            (tally, Instant::now())
        });

        let tally = Arc::new(Mutex::new(tally));
        let (looks, end) = channel();
        let looked_at = Arc::clone(&tally);
        let thread = thread::Builder::new().name("stopwatch".to_owned());
        let started = thread.spawn(move || look_until(&end, &looked_at));
        drop(started.expect("a thread of a stopwatch"));
        Self { tally, begun, _looks: looks }
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Elapsed {
        let mut tally = lock(&self.tally);
        shortest_read(|| {
            let total = self.begun.elapsed();
            tally.look();
            Elapsed { total, waited: tally.waited(), stolen: tally.stolen() }
        })
    }

    /// Checks that the time since the start [is within](Elapsed::is_within) the limit.
    ///
    /// # Panics
    /// If it is not.
    #[track_caller]
    pub fn assert_within(&self, limit: Duration) {
        let took = self.elapsed();
        assert!(took.is_within(limit), "it took {took}, expected {limit:?}");
    }
}

/// A time that a [`Stopwatch`] measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Elapsed {
    /// The time on the clock.
    pub total: Duration,
    /// How long threads waited for a processor, as [`Stopwatch`] adds it up.
    pub waited: Duration,
    /// How long the host of a virtual machine kept a processor from it. Depending on the kernel, `waited` and the processor
    /// time of a thread hold a part of this.
    pub stolen: Duration,
}

impl Elapsed {
    /// Returns the time that it would have taken if a processor had always been free.
    pub fn net(self) -> Duration {
        self.total.saturating_sub(self.waited + self.stolen)
    }

    /// Returns whether the net time is below the limit, and the time on the clock no more than ten seconds above it: however
    /// busy the machine is, a wait without an end is no success.
    pub fn is_within(self, limit: Duration) -> bool {
        self.net() < limit && self.total < limit + TOTAL_EXCESS_MAX
    }
}

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { total, waited, stolen } = self;
        write!(f, "{total:?}, in which threads waited {waited:?} for a processor")?;
        if !stolen.is_zero() {
            write!(f, " and the machine {stolen:?} for its host")?;
        }
        Ok(())
    }
}

/// Reads the waits and the clock until both are of the same moment, because this thread had a processor all the time.
/// Returns what took the shortest time if that never happens.
fn shortest_read<T>(mut read: impl FnMut() -> T) -> T {
    let timed = |_| {
        let begun = Instant::now();
        let result = read();
        (begun.elapsed(), result)
    };
    let mut best: Option<(Duration, T)> = None;
    for (took, result) in (0..READS_MAX).map(timed) {
        if best.as_ref().is_none_or(|(shortest, _)| took < *shortest) {
            best = Some((took, result));
        }
        if took < READ_TIME_MAX {
            break;
        }
    }
    best.expect("it was read at least once").1
}

/// Looks at the waits until nobody needs them any more, so that those of threads that end are known.
fn look_until(end: &Receiver<()>, tally: &Mutex<Tally>) {
    let mut pause = LOOK_PAUSE;
    while end.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        let begun = Instant::now();
        lock(tally).look();
        // A program of many threads must not spend its time on looks.
        pause = LOOK_PAUSE.max(20 * begun.elapsed());
    }
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long each thread has waited for a processor since it began.
type Waits = HashMap<u32, Duration>;

/// The waits at the start and at the last look that found the thread.
#[derive(Debug)]
struct Growth {
    before: Waits,
    latest: Waits,
}

impl Growth {
    fn new(before: Waits) -> Self {
        Self { latest: before.clone(), before }
    }

    fn of_each(&self) -> impl Iterator<Item = Duration> {
        self.latest.iter().map(|(thread, latest)| {
            // A thread that has begun meanwhile has waited for all of its time, even if it has the number of another.
            let before = self.before.get(thread).filter(|before| *before <= latest);
            *latest - before.copied().unwrap_or_default()
        })
    }
}

/// All that is subtracted.
#[derive(Debug)]
struct Tally {
    /// The name of the thread that started the measurement.
    own_name: String,
    own: Growth,
    others: Vec<(u32, Growth)>,
    stolen_before: Vec<Duration>,
}

impl Tally {
    fn new(others: impl IntoIterator<Item = u32>) -> Self {
        let own_name = fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
        let others = others.into_iter().map(|process| (process, Growth::new(waits_of(process))));
        Self {
            own: Growth::new(waits_here(&own_name)),
            own_name,
            others: others.collect(),
            stolen_before: stolen_times(),
        }
    }

    fn look(&mut self) {
        self.own.latest.extend(waits_here(&self.own_name));
        for (process, growth) in &mut self.others {
            growth.latest.extend(waits_of(*process));
        }
    }

    fn waited(&self) -> Duration {
        let own: Duration = self.own.of_each().sum();
        let longest = |(_, growth): &(u32, Growth)| growth.of_each().max().unwrap_or_default();
        let others: Duration = self.others.iter().map(longest).sum();
        own + others
    }

    /// Returns how long the host of a virtual machine kept the processor from it that was away longest, because all can be
    /// away at the same time. No thread of the machine counts as waiting for a processor that is away while it runs there.
    fn stolen(&self) -> Duration {
        let stolen = stolen_times().into_iter().zip(&self.stolen_before);
        stolen.map(|(now, before)| now.saturating_sub(*before)).max().unwrap_or_default()
    }
}

/// Returns the waits of those threads of this process that count.
fn waits_here(own_name: &str) -> Waits {
    let threads = list_threads(std::process::id()).into_iter().filter(|thread| {
        let name = fs::read_to_string(thread.join("comm")).unwrap_or_default();
        name == own_name || PRODUCT_NAMES.iter().any(|begin| name.starts_with(begin))
    });
    threads.filter_map(|thread| thread_wait(&thread)).collect()
}

/// Returns the waits of all threads of a process.
fn waits_of(process: u32) -> Waits {
    list_threads(process).iter().filter_map(|thread| thread_wait(thread)).collect()
}

/// Returns the folders of the threads of a process.
fn list_threads(process: u32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{process}/task"));
    entries.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

/// Returns the number of a thread and how long it has waited for a processor, or `None` if it has just ended.
fn thread_wait(thread: &Path) -> Option<(u32, Duration)> {
    // The time on a processor, the time of waits for one, and the number of time slices.
    let text = fs::read_to_string(thread.join("schedstat")).ok()?;
    let nanos = text.split_whitespace().nth(1)?.parse().ok()?;
    let number = thread.file_name()?.to_str()?.parse().ok()?;
    Some((number, Duration::from_nanos(nanos)))
}

/// Returns the steal time of each processor: how long the host of a virtual machine kept it from the machine.
fn stolen_times() -> Vec<Duration> {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    // The first line is the sum of all processors.
    let processors = text.lines().skip(1).take_while(|line| line.starts_with("cpu"));
    processors
        .map(|line| {
            let ticks = line.split_whitespace().nth(8).and_then(|ticks| ticks.parse().ok());
            TICK * ticks.unwrap_or(0)
        })
        .collect()
}
