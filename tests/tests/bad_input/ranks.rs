//! Runs ranks as threads, each with its own result.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use peerlane_collectives::bootstrap::in_process::{self, InProcessBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_hal::Rank;
use peerlane_host as host;
use peerlane_test_support::Stopwatch;

/// Far above what any test here waits for.
pub(crate) const LONG: Duration = Duration::from_secs(20);
/// What is waited for on purpose.
pub(crate) const SHORT: Duration = Duration::from_secs(4);
/// Nobody waits longer than this beyond the timeout. The ranks are asked before one is blamed; they have up to 2 s for the
/// answer if the exchanges of the group took long.
const GRACE: Duration = Duration::from_millis(2500);

pub(crate) type Host = Group;

/// Runs `body` as each rank; whatever they return, they return it soon, or after a short timeout.
pub(crate) fn on_ranks<R: Send>(
    ranks: usize,
    body: impl Fn(InProcessBootstrap) -> R + Sync,
) -> Vec<R> {
    let watch = Stopwatch::start();
    let handles = in_process::group(ranks).expect("a group of threads");
    let results = std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            handles.into_iter().map(|handle| scope.spawn(move || body(handle))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    });
    watch.assert_within(SHORT + GRACE);
    results
}

/// Runs `body` as each rank of an open group over the host backend.
pub(crate) fn in_group<R: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(Host) -> R + Sync,
) -> Vec<R> {
    on_ranks(ranks, |bootstrap| body(open(bootstrap, timeout).expect("the group opens")))
}

pub(crate) fn open(bootstrap: InProcessBootstrap, timeout: Duration) -> Result<Group, Error> {
    let fabric = fabric(&bootstrap);
    GroupOptions::default().timeout(timeout).open(bootstrap, fabric)
}

pub(crate) fn fabric(bootstrap: &InProcessBootstrap) -> host::Fabric {
    use peerlane_collectives::bootstrap::Bootstrap;
    host::Fabric::open(bootstrap.rank(), bootstrap.ranks()).expect("a fabric")
}

/// What an error says, on one line: its kind, the rank that it names, and its text.
pub(crate) fn said<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => "ok".to_owned(),
        Err(error) => {
            let peer = error.peer().map_or_else(|| "no rank".into(), |peer| format!("rank {peer}"));
            format!("{}, {peer}: {error}", error.kind())
        }
    }
}

/// What all ranks said, a line each; one line if all said the same.
pub(crate) fn all_said<T>(results: Vec<Result<T, Error>>) -> String {
    let lines: Vec<_> = results.into_iter().map(said).map(without_available).collect();
    if lines.iter().all(|line| *line == lines[0]) {
        return format!("all: {}", lines[0]);
    }
    let lines =
        Rank::all(lines.len()).zip(lines).map(|(rank, line)| format!("rank {rank}: {line}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// How much memory the machine has left differs from rank to rank and from run to run.
fn without_available(text: String) -> String {
    let Some((head, tail)) = text.split_once(" bytes are available") else { return text };
    let head = head.trim_end_matches(|letter: char| letter.is_ascii_digit());
    format!("{head}SOME bytes are available{tail}")
}

/// Gathers in a group that must still be whole.
pub(crate) fn gather(group: &mut Group) -> Result<(), Error> {
    let mut gather = group.all_gather::<u8>(3).prepare()?;
    let rank = u8::try_from(group.rank().0).expect("groups of tests are small");
    gather.input_mut()?.fill(rank);
    gather.run()?;
    let wanted: Vec<u8> = (0..group.ranks()).flat_map(|rank| [rank as u8; 3]).collect();
    assert_eq!(gather.output()?, wanted);
    Ok(())
}

/// Holds ranks until another has done something.
#[derive(Default)]
pub(crate) struct Latch {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Latch {
    pub(crate) fn come(&self) {
        *self.count.lock().expect("nobody panics in here") += 1;
        self.changed.notify_all();
    }

    /// Waits until so many have come.
    pub(crate) fn wait_for(&self, count: usize) {
        let came = self.count.lock().expect("nobody panics in here");
        let waited = self.changed.wait_timeout_while(came, LONG, |came| *came < count);
        let timeout = waited.expect("nobody panics in here").1;
        assert!(!timeout.timed_out(), "{count} ranks did not come");
    }
}
