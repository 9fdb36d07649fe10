//! Runs the ranks of a check as threads: opens and connects them, and creates their windows and
//! engines.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::{
    Caps, CopyEngine, Deadline, Fabric, PeerMemory, Rank, Region as _, RemoteKey, Role,
};

use crate::data::POISON;
use crate::engine::TestEngine;
use crate::failure::{Failure, Outcome, ensure, ensure_all, ensure_bytes};
use crate::harness::{EngineOf, ErrorOf, FabricOf, Harness, LocalOf, OwnMemory, RemoteOf};

/// Runs `body` as each of `ranks` ranks. Returns the failure of a rank that failed by itself, in
/// preference to one that failed because of another rank.
pub(crate) fn on_ranks<H: Harness>(
    harness: &H,
    ranks: usize,
    body: impl Fn(&mut Participant<'_, H>) -> Outcome + Sync,
) -> Outcome {
    let rendezvous = Rendezvous::new(ranks, harness.limit_of("all ranks"));
    let run = |rank| {
        let body = || {
            Participant::open(harness, &rendezvous, rank, ranks).and_then(|mut me| body(&mut me))
        };
        let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("panic without a text");
            Err(Failure::new(format!("panicked: {text}")))
        });

        outcome.map_err(|failure| {
            rendezvous.fail(rank);
            failure.within(format!("rank {rank} of {ranks}"))
        })
    };

    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = Rank::all(ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught inside")).collect()
    });

    let mut failures: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    failures.sort_by_key(Failure::is_echo);
    failures.into_iter().next().map_or(Ok(()), Err)
}

/// Runs `body` once for each number of ranks.
pub(crate) fn on_each<H: Harness>(
    harness: &H,
    ranks: impl IntoIterator<Item = usize>,
    body: impl Fn(&mut Participant<'_, H>) -> Outcome + Sync,
) -> Outcome {
    ranks.into_iter().try_for_each(|ranks| on_ranks(harness, ranks, &body))
}

/// One rank of a check.
pub(crate) struct Participant<'w, H: Harness> {
    pub(crate) harness: &'w H,
    pub(crate) rendezvous: &'w Rendezvous,
    pub(crate) me: usize,
    pub(crate) ranks: usize,
    pub(crate) fabric: FabricOf<H>,
    /// What every engine of the fabric supports.
    pub(crate) caps: Caps,
    exchanges: usize,
}

/// One region for each rank, imported by all.
pub(crate) struct Window<H: Harness> {
    // Declared before `local`, so that imports are dropped before the memory.
    pub(crate) remote: Vec<RemoteOf<H>>,
    pub(crate) local: LocalOf<H>,
}

impl<'w, H: Harness> Participant<'w, H> {
    /// Returns the other ranks.
    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + Clone + use<H> {
        let me = self.me;
        (0..self.ranks).filter(move |peer| *peer != me)
    }

    /// Opens the fabric and connects all ranks.
    fn open(harness: &'w H, rendezvous: &'w Rendezvous, rank: Rank, ranks: usize) -> Outcome<Self> {
        let fabric = harness.open(rank, ranks).map_err(|e| Failure::from(e).within("open"))?;
        Self::connect(harness, rendezvous, (rank, ranks), fabric, 0, |_| Ok(())).map(|(me, ())| me)
    }

    /// Opens the fabric of this rank again, as another rank of as many, and connects all ranks; collective. The rank takes part
    /// in exchanges as the new one from then on.
    pub(crate) fn reopen(&self, rank: Rank) -> Outcome<Self> {
        self.reopen_with(rank, |_| Ok(())).map(|(me, ())| me)
    }

    /// Reopens the fabric as [`reopen`](Self::reopen) does. Calls `alone` after the rank has connected to itself and before it
    /// connects to its peers.
    pub(crate) fn reopen_with<T>(
        &self,
        rank: Rank,
        alone: impl FnOnce(&FabricOf<H>) -> Outcome<T>,
    ) -> Outcome<(Self, T)> {
        let fabric = self.fabric.reopen(rank, self.ranks);
        let fabric = fabric.map_err(|e| Failure::from(e).within("reopen"))?;
        let found = fabric.rank();
        ensure!(found == rank, "the fabric was reopened as rank {rank}, but it is rank {found}");
        ensure!(
            Rank::all(self.ranks).all(|peer| fabric.link(peer).is_none()),
            "the reopened fabric of rank {rank} is connected before `connect`"
        );
        let of = (rank, self.ranks);
        Self::connect(self.harness, self.rendezvous, of, fabric, self.exchanges, alone)
    }

    fn connect<T>(
        harness: &'w H,
        rendezvous: &'w Rendezvous,
        (rank, ranks): (Rank, usize),
        mut fabric: FabricOf<H>,
        exchanges: usize,
        alone: impl FnOnce(&FabricOf<H>) -> Outcome<T>,
    ) -> Outcome<(Self, T)> {
        let timeout = harness.limit_of("a connection");
        let addresses = rendezvous.exchange(rank, exchanges, fabric.address())?;
        let connect = |fabric: &mut FabricOf<H>, peer: Rank| {
            let connected =
                fabric.connect(peer, &addresses[peer.index()], Deadline::after(timeout));
            connected.map_err(|e| Failure::from(e).within(format!("connect rank {peer}")))
        };
        connect(&mut fabric, rank)?;
        let made = alone(&fabric)?;
        let mut peers = Rank::all(ranks).filter(|peer| *peer != rank);
        peers.try_for_each(|peer| connect(&mut fabric, peer))?;
        let caps = *engine_of::<H>(&fabric)?.caps();
        let (me, exchanges) = (rank.index(), exchanges + 1);
        let mut me = Self { harness, rendezvous, me, ranks, fabric, caps, exchanges };
        // No rank may be signalled before it is connected.
        me.barrier()?;
        Ok((me, made))
    }

    pub(crate) fn rank(&self) -> Rank {
        Rank::at(self.me)
    }

    /// Returns the rank `steps` after this one.
    pub(crate) fn rank_after(&self, steps: usize) -> usize {
        (self.me + steps) % self.ranks
    }

    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.harness.limit_of("a call of the backend"))
    }

    pub(crate) fn time_limit(&self, what: impl Into<String>) -> TimeLimit<'w> {
        self.rendezvous.time_limit(self.harness, what)
    }

    /// Exchanges one blob for each rank.
    pub(crate) fn exchange(&mut self, blob: Vec<u8>) -> Outcome<Vec<Vec<u8>>> {
        self.exchanges += 1;
        self.rendezvous.exchange(self.rank(), self.exchanges - 1, blob)
    }

    /// Waits for all ranks.
    pub(crate) fn barrier(&mut self) -> Outcome {
        self.exchange(Vec::new()).map(drop)
    }

    pub(crate) fn allocate(&self, bytes: u64, role: Role) -> Outcome<LocalOf<H>> {
        let local = self.fabric.memory().allocate(bytes, role);
        local.map_err(|e| Failure::from(e).within(format!("allocate {bytes} bytes, {role:?}")))
    }

    /// Allocates own memory, which lives until all ranks of the check have ended.
    pub(crate) fn own_memory(&self, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        let memory = self.harness.own_memory(self.rank(), bytes)?;
        self.rendezvous.keep(Arc::clone(&memory));
        Some(memory)
    }

    /// Registers a part of own memory.
    pub(crate) fn register(
        &self,
        memory: &dyn OwnMemory,
        span: Range<usize>,
        role: Role,
    ) -> Result<LocalOf<H>, ErrorOf<H>> {
        assert!(
            span.end as u64 <= memory.bytes(),
            "access out of range: {span:?}, but the memory has {} bytes",
            memory.bytes()
        );
        // SAFETY: just checked to lie inside the memory.
        let base = unsafe { memory.base().add(span.start) };
        // SAFETY: the rendezvous keeps own memory until the ranks, and so all imports, have ended; it is
        // zero at first, and the checks keep to the role.
        unsafe { self.fabric.memory().register(base, span.len() as u64, role) }
    }

    /// Exchanges keys of `local` and imports every rank's region; collective.
    pub(crate) fn share(&mut self, local: LocalOf<H>) -> Outcome<Window<H>> {
        let key =
            self.fabric.memory().export(&local).map_err(|e| Failure::from(e).within("export"))?;
        let keys = self.exchange(key.encode())?;
        let mut remote = Vec::with_capacity(self.ranks);
        for (peer, key) in Rank::all(self.ranks).zip(keys) {
            let key = RemoteKey::decode(&key)?;
            let imported = self.fabric.memory().import(peer, &key, self.deadline());
            let place = || format!("import from rank {peer}");
            remote.push(imported.map_err(|e| Failure::from(e).within(place()))?);
        }
        // No rank may free its region before the others have imported it.
        self.barrier()?;
        Ok(Window { remote, local })
    }

    /// Allocates flags on every rank, where the host can poll them if the engine cannot wait, and exchanges them; collective.
    pub(crate) fn flags(&mut self, words: u64) -> Outcome<Window<H>> {
        let local =
            match self.caps.queued_wait {
                true => self.allocate(words * 8, Role::Flags)?,
                false => self.fabric.memory().allocate_polled_flags(words * 8).map_err(|e| {
                    Failure::from(e).within(format!("allocate {words} polled flags"))
                })?,
            };
        self.share(local)
    }

    /// Allocates poisoned bytes on every rank and exchanges them; collective.
    pub(crate) fn bytes(&mut self, bytes: u64) -> Outcome<Window<H>> {
        let local = self.allocate(bytes, Role::Data)?;
        self.poison(&local, 0..bytes);
        self.share(local)
    }

    /// Creates an engine, which all its regions must outlive.
    pub(crate) fn engine<'r>(&mut self) -> Outcome<TestEngine<'r, 'w, H>> {
        engine_of::<H>(&self.fabric).map(|engine| self.drive(engine))
    }

    /// Wraps an engine of this rank for checks. All its regions must outlive it.
    pub(crate) fn drive<'r>(&self, inner: EngineOf<H>) -> TestEngine<'r, 'w, H> {
        let (harness, rendezvous) = (self.harness, self.rendezvous);
        TestEngine { inner, harness, rendezvous, regions: PhantomData }
    }

    /// Reads a flag. The device that holds it may be too busy to answer at once.
    pub(crate) fn flag_value(&self, flags: &LocalOf<H>, word: u64) -> Outcome<u64> {
        let time_limit = self.time_limit(format!("the value of flag {word}"));
        loop {
            if let Some(value) = flags.flag_value(word) {
                return Ok(value);
            }
            time_limit.check(|| format!("flag_value({word}) returned None"))?;
            std::thread::yield_now();
        }
    }

    pub(crate) fn write(&self, local: &LocalOf<H>, offset: u64, bytes: &[u8]) {
        self.harness.write(local, offset, bytes);
    }

    pub(crate) fn read(&self, local: &LocalOf<H>, offset: u64, bytes: u64) -> Vec<u8> {
        read(self.harness, local, offset, bytes)
    }

    pub(crate) fn poison(&self, local: &LocalOf<H>, span: Range<u64>) {
        let bytes = usize::try_from(span.end - span.start).expect("a region fits");
        self.write(local, span.start, &vec![POISON; bytes]);
    }

    pub(crate) fn ensure_poison(
        &self,
        what: &str,
        local: &LocalOf<H>,
        span: Range<u64>,
    ) -> Outcome {
        ensure_all(what, &self.read(local, span.start, span.end - span.start), POISON)
    }

    pub(crate) fn ensure_bytes(
        &self,
        what: &str,
        local: &LocalOf<H>,
        offset: u64,
        expected: &[u8],
    ) -> Outcome {
        ensure_bytes(what, &self.read(local, offset, expected.len() as u64), expected)
    }
}

pub(crate) fn engine_of<H: Harness>(fabric: &FabricOf<H>) -> Outcome<EngineOf<H>> {
    fabric.engine(Default::default()).map_err(|e| Failure::from(e).within("engine"))
}

/// Returns bytes of a region.
pub(crate) fn read<H: Harness>(
    harness: &H,
    local: &LocalOf<H>,
    offset: u64,
    bytes: u64,
) -> Vec<u8> {
    let mut seen = vec![0; usize::try_from(bytes).expect("a region fits the address space")];
    harness.read(local, offset, &mut seen);
    seen
}

/// Time for which a check watches that nothing happens: long enough to show a wrong effect, short
/// enough for many checks.
pub(crate) const QUIET: Duration = Duration::from_millis(15);

/// Lets the ranks of a check exchange bytes out of band, and tells them when one has failed.
pub(crate) struct Rendezvous {
    ranks: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// One blob for each rank, for each round of the exchange.
    rounds: Vec<Vec<Option<Vec<u8>>>>,
    failed: Option<Rank>,
    /// Own memory of all ranks. It must outlive every import, also when a rank fails early.
    own_memory: Vec<Arc<dyn OwnMemory>>,
}

impl Rendezvous {
    pub(crate) fn new(ranks: usize, timeout: Duration) -> Self {
        Self { ranks, timeout, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Everybody's blob of this round, once all have come.
    pub(crate) fn exchange(
        &self,
        rank: Rank,
        round: usize,
        blob: Vec<u8>,
    ) -> Outcome<Vec<Vec<u8>>> {
        let deadline = Deadline::after(self.timeout);
        let mut state = self.state();
        if state.rounds.len() <= round {
            state.rounds.resize(round + 1, vec![None; self.ranks]);
        }
        state.rounds[round][rank.index()] = Some(blob);
        self.changed.notify_all();
        loop {
            // Checked first: a rank that has all blobs can go on, also after a failure of another rank.
            if let Some(blobs) = state.rounds[round].iter().cloned().collect() {
                return Ok(blobs);
            }
            if let Some(failed) = state.failed {
                return Err(Failure::echo(format!("rank {failed} failed")));
            }
            if deadline.has_passed() {
                let missing =
                    Rank::all(self.ranks).find(|r| state.rounds[round][r.index()].is_none());
                let missing = missing.map_or_else(String::new, |rank| rank.to_string());
                return Err(Failure::echo(format!(
                    "rank {missing} did not reach exchange {round} of the check in time"
                )));
            }
            let wait = self.changed.wait_timeout(state, deadline.remaining());
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn fail(&self, rank: Rank) {
        self.state().failed.get_or_insert(rank);
        self.changed.notify_all();
    }

    pub(crate) fn keep(&self, memory: Arc<dyn OwnMemory>) {
        self.state().own_memory.push(memory);
    }

    /// Creates the limit of a loop that waits for `what`.
    pub(crate) fn time_limit<H: Harness>(
        &self,
        harness: &H,
        what: impl Into<String>,
    ) -> TimeLimit<'_> {
        let what = what.into();
        let deadline = Deadline::after(harness.limit_of(&what));
        TimeLimit { rendezvous: self, what, deadline }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each blob is stored at once, so a rank that panicked leaves the state valid.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a loop after a timeout, or when another rank has failed.
pub(crate) struct TimeLimit<'a> {
    rendezvous: &'a Rendezvous,
    what: String,
    deadline: Deadline,
}

impl TimeLimit<'_> {
    /// Fails if the loop must end; `seen` describes its last state.
    pub(crate) fn check(&self, seen: impl FnOnce() -> String) -> Outcome {
        if self.deadline.has_passed() {
            let (what, timeout, seen) = (&self.what, self.deadline.timeout(), seen());
            return Err(Failure::new(format!(
                "timed out after {timeout:?}: waited for {what}; last state: {seen}"
            )));
        }
        match self.rendezvous.state().failed {
            None => Ok(()),
            Some(rank) => Err(Failure::echo(format!("rank {rank} failed"))),
        }
    }
}
