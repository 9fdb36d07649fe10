//! The ranks of a check as threads: opened, connected, and provided with windows and engines.

use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{Caps, CopyEngine, Deadline, Fabric, PeerMemory, Rank, RemoteKey, Role};

use crate::board::{Board, Patience};
use crate::data::POISON;
use crate::driver::Driver;
use crate::failure::{Failure, Outcome, ensure_all, ensure_bytes};
use crate::harness::{ErrorOf, FabricOf, Harness, LocalOf, OwnMemory, RemoteOf};

/// Runs `body` as each of `ranks` ranks; the failure is that of the rank which failed by itself.
pub(crate) fn on_ranks<H: Harness>(
    harness: &H,
    ranks: usize,
    body: impl Fn(&mut Participant<'_, H>) -> Outcome + Sync,
) -> Outcome {
    let board = Board::new(ranks, harness.timeout());
    let run = |rank| {
        let body =
            || Participant::open(harness, &board, rank, ranks).and_then(|mut me| body(&mut me));
        let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
            Err(Failure::new(format!("panicked: {text}")))
        });
        outcome.map_err(|failure| {
            board.fail(rank);
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

/// The same for each number of ranks.
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
    pub(crate) board: &'w Board,
    pub(crate) me: usize,
    pub(crate) ranks: usize,
    pub(crate) fabric: FabricOf<H>,
    /// What every engine of the fabric can do.
    pub(crate) caps: Caps,
    meetings: usize,
}

/// One region a rank, imported by all.
pub(crate) struct Window<H: Harness> {
    // Before `local`: imports end before the memory does.
    pub(crate) remote: Vec<RemoteOf<H>>,
    pub(crate) local: LocalOf<H>,
}

impl<'w, H: Harness> Participant<'w, H> {
    /// Opens the fabric and connects all ranks.
    fn open(harness: &'w H, board: &'w Board, rank: Rank, ranks: usize) -> Outcome<Self> {
        let timeout = harness.timeout();
        let mut fabric = harness.open(rank, ranks).map_err(|e| Failure::from(e).within("open"))?;
        let addresses = board.exchange(rank, 0, fabric.address())?;
        for (peer, address) in Rank::all(ranks).zip(addresses) {
            let connected = fabric.connect(peer, &address, Deadline::after(timeout));
            connected.map_err(|e| Failure::from(e).within(format!("connect rank {peer}")))?;
        }
        let caps = *fabric
            .engine(Default::default())
            .map_err(|e| Failure::from(e).within("engine"))?
            .caps();
        let mut me = Self { harness, board, me: rank.index(), ranks, fabric, caps, meetings: 1 };
        // Nobody signals a rank that is not yet connected.
        me.meet()?;
        Ok(me)
    }

    pub(crate) fn rank(&self) -> Rank {
        Rank::at(self.me)
    }

    /// The rank `steps` further.
    pub(crate) fn after(&self, steps: usize) -> usize {
        (self.me + steps) % self.ranks
    }

    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.harness.timeout())
    }

    pub(crate) fn patience(&self, what: impl Into<String>) -> Patience<'w> {
        self.board.patience(what)
    }

    pub(crate) fn exchange(&mut self, blob: Vec<u8>) -> Outcome<Vec<Vec<u8>>> {
        self.meetings += 1;
        self.board.exchange(self.rank(), self.meetings - 1, blob)
    }

    /// Waits for all ranks.
    pub(crate) fn meet(&mut self) -> Outcome {
        self.exchange(Vec::new()).map(drop)
    }

    pub(crate) fn allocate(&self, bytes: u64, role: Role) -> Outcome<LocalOf<H>> {
        let local = self.fabric.memory().allocate(bytes, role);
        local.map_err(|e| Failure::from(e).within(format!("allocate {bytes} bytes, {role:?}")))
    }

    /// Own memory that outlives the check's ranks.
    pub(crate) fn own_memory(&self, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        let memory = self.harness.own_memory(bytes)?;
        self.board.keep(Arc::clone(&memory));
        Some(memory)
    }

    /// Registers a part of own memory.
    pub(crate) fn register(
        &self,
        memory: &dyn OwnMemory,
        span: Range<usize>,
        role: Role,
    ) -> Result<LocalOf<H>, ErrorOf<H>> {
        assert!(span.end as u64 <= memory.bytes(), "{span:?} leaves own memory");
        // SAFETY: just checked to lie inside the memory.
        let base = unsafe { memory.base().add(span.start) };
        // SAFETY: the board keeps own memory until the ranks, and so all imports, have ended; it is
        // zero at first, and the checks keep to the role.
        unsafe { self.fabric.memory().register(base, span.len() as u64, role) }
    }

    /// Exchanges keys of `local` and imports everybody's; collective.
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
        // Nobody frees what another one has not imported yet.
        self.meet()?;
        Ok(Window { remote, local })
    }

    /// Flags on every rank; collective.
    pub(crate) fn flags(&mut self, words: u64) -> Outcome<Window<H>> {
        let local = self.allocate(words * 8, Role::Flags)?;
        self.share(local)
    }

    /// Poisoned bytes on every rank; collective.
    pub(crate) fn bytes(&mut self, bytes: u64) -> Outcome<Window<H>> {
        let local = self.allocate(bytes, Role::Data)?;
        self.poison(&local, 0..bytes);
        self.share(local)
    }

    /// A new engine, whose regions all outlive it.
    pub(crate) fn engine<'r>(&mut self) -> Outcome<Driver<'r, 'w, H>> {
        let engine = self
            .fabric
            .engine(Default::default())
            .map_err(|e| Failure::from(e).within("engine"))?;
        let (harness, board) = (self.harness, self.board);
        Ok(Driver { engine, harness, board, regions: PhantomData })
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
        wanted: &[u8],
    ) -> Outcome {
        ensure_bytes(what, &self.read(local, offset, wanted.len() as u64), wanted)
    }
}

/// Bytes of a region.
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

/// Long enough for a wrong move to show, short enough for many checks.
pub(crate) const QUIET: Duration = Duration::from_millis(15);
