//! Wraps fabrics of the host backend and breaks one rule of their keys, imports or addresses.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::{
    BackendId, Deadline, DynRegion, EngineOffer, EngineRequirements, Error as _, ErrorKind, Fabric,
    Generation, KeyError, Link, PeerMemory, Rank, Region, RemoteKey, Role,
};
use peerlane_host as host;
use peerlane_tests::Harness;

/// The broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Bytes that are no key make a key of nothing.
    AnyBytesAreAKey,
    /// Bytes that are no key panic.
    NoKeyPanics,
    /// A key that travelled names a byte more.
    KeysGrow,
    /// A refused key opens other memory.
    RefusedKeysOpen,
    /// One's own key opens a copy.
    AliasesAreCopies,
    /// Registered memory is other memory.
    RegisteredIsCopied,
    /// A malformed address is connected to nobody.
    AnyAddressConnects,
    /// Flags are as an earlier region left them.
    ReusedAsItWas,
    /// New memory is as an earlier owner left it.
    AllocatesDirty,
    /// Any address is taken for one of this device.
    AdoptsAnyAddress,
    /// A key is imported without a connection.
    ImportsUnconnected,
    /// Flags in memory of the host are refused.
    RefusesFlagsOfTheHost,
    /// Memory of no bytes is refused.
    RefusesNoBytes,
    /// A second connection to a peer is refused.
    ConnectsOnce,
    /// A fabric is reopened as the rank that it was.
    ReopensAsItself,
    /// Engines have other capabilities than the fabric offers.
    OffersMore,
    /// An engine is created whatever kind is asked for.
    TakesAnyKind,
}

/// The flaw of all fabrics of this process, because a key is decoded without an object that could hold it.
static FLAW: Mutex<Option<Flaw>> = Mutex::new(None);
/// Lets the trials of flaws take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Calls `run` while all fabrics of mutants have the flaw.
pub(crate) fn with_flaw<T>(flaw: Flaw, run: impl FnOnce() -> T) -> T {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    *FLAW.lock().unwrap() = Some(flaw);
    run()
}

fn has(flaw: Flaw) -> bool {
    *FLAW.lock().unwrap() == Some(flaw)
}

/// The harness of a broken fabric.
pub(crate) struct FabricMutant {
    pub(crate) limit_of: Box<dyn Fn(&str) -> Duration + Send + Sync>,
}

impl Harness for FabricMutant {
    type Fabric = Flawed;

    fn name(&self) -> &str {
        "mutant"
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Flawed, host::Error> {
        let fabric = host::Fabric::open(rank, ranks)?;
        // Memory of a second fabric, since the first cannot be borrowed and wrapped at once.
        Flawed::over(fabric, host::Fabric::open(rank, ranks)?)
    }

    fn limit_of(&self, wait: &str) -> Duration {
        (self.limit_of)(wait)
    }
}

pub(crate) struct Flawed {
    memory: FlawedMemory,
    fabric: host::Fabric,
}

impl Flawed {
    fn over(fabric: host::Fabric, mut own: host::Fabric) -> Result<Self, host::Error> {
        let address = own.address();
        own.connect(own.rank(), &address, Deadline::after(Duration::from_secs(5)))?;
        Ok(Self { memory: FlawedMemory { own }, fabric })
    }
}

pub(crate) struct FlawedMemory {
    own: host::Fabric,
}

/// `None`: no key, taken for one.
pub(crate) struct FlawedKey {
    key: Option<host::Key>,
    travelled: bool,
}

impl RemoteKey for FlawedKey {
    fn encode(&self) -> Vec<u8> {
        self.key.as_ref().map_or_else(Vec::new, RemoteKey::encode)
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let key = host::Key::decode(bytes);
        let key = match key {
            Err(_) if has(Flaw::AnyBytesAreAKey) => None,
            Err(error) if has(Flaw::NoKeyPanics) => panic!("bytes are a key: {error}"),
            key => Some(key?),
        };
        Ok(Self { key, travelled: true })
    }

    fn region_bytes(&self) -> u64 {
        let more = u64::from(has(Flaw::KeysGrow) && self.travelled);
        self.key.as_ref().map_or(0, RemoteKey::region_bytes) + more
    }

    fn generation(&self) -> Generation {
        self.key.as_ref().map_or(Generation(0), RemoteKey::generation)
    }
}

impl FlawedMemory {
    /// Some memory, only not that of the key.
    fn other(&self, bytes: u64, deadline: Deadline) -> Result<host::Remote, host::Error> {
        let memory = self.own.memory();
        let local = memory.allocate(bytes, Role::Data)?;
        let key = memory.export(&local)?;
        memory.import(self.own.rank(), &key, deadline)
    }
}

// SAFETY: it breaks the contract only in ways that the checks of this test find, in memory of the test.
unsafe impl PeerMemory for FlawedMemory {
    type Error = host::Error;
    type Key = FlawedKey;
    type Local = host::Local;
    type Remote = host::Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<host::Local, host::Error> {
        if has(Flaw::RefusesNoBytes) && bytes == 0 {
            return Err(host::Error::Argument("there must be a byte".to_owned()));
        }
        let region = self.own.memory().allocate(bytes, role)?;
        if has(Flaw::AllocatesDirty) && role == Role::Data {
            // SAFETY: the region is new, so nobody else accesses its bytes.
            unsafe { region.base().as_ptr().write_bytes(1, region.bytes() as usize) };
        }
        Ok(region)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<host::Local, host::Error> {
        let flags = self.own.memory().allocate_polled_flags(bytes)?;
        if has(Flaw::ReusedAsItWas) {
            flags.flags().into_iter().flatten().for_each(|flag| flag.store(1, Ordering::Release));
        }
        Ok(flags)
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<host::Local, host::Error> {
        if has(Flaw::AdoptsAnyAddress) {
            // SAFETY: the caller upholds the same contract.
            return unsafe { self.register(region.base(), region.bytes(), role) };
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { self.own.memory().adopt(region, role) }
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<host::Local, host::Error> {
        if has(Flaw::RefusesFlagsOfTheHost) && role == Role::Flags {
            let text = "flags are in memory of the device only".to_owned();
            return Err(host::Error::Argument(text));
        }
        if has(Flaw::RegisteredIsCopied) {
            return self.allocate(bytes, role);
        }
        // SAFETY: the caller's promise.
        unsafe { self.own.memory().register(base, bytes, role) }
    }

    fn export(&self, local: &host::Local) -> Result<Self::Key, host::Error> {
        Ok(FlawedKey { key: Some(self.own.memory().export(local)?), travelled: false })
    }

    fn import(
        &self,
        peer: Rank,
        key: &Self::Key,
        deadline: Deadline,
    ) -> Result<host::Remote, host::Error> {
        let Some(inner) = &key.key else { return self.other(1, deadline) };
        if has(Flaw::AliasesAreCopies) && peer == self.own.rank() {
            return self.other(inner.region_bytes(), deadline);
        }
        match self.own.memory().import(peer, inner, deadline) {
            Err(error) if has(Flaw::RefusedKeysOpen) && error.kind() == ErrorKind::InvalidKey => {
                self.other(inner.region_bytes(), deadline)
            }
            answer => answer,
        }
    }
}

// SAFETY: it breaks the contract only in ways that the checks of this test find, in memory of the test.
unsafe impl Fabric for Flawed {
    type Error = host::Error;
    type Memory = FlawedMemory;
    type Engine = host::Engine;

    fn backend(&self) -> BackendId {
        self.fabric.backend()
    }

    fn rank(&self) -> Rank {
        self.fabric.rank()
    }

    fn memory(&self) -> &Self::Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.fabric.address()
    }

    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), host::Error> {
        if has(Flaw::ConnectsOnce) && self.fabric.link(peer).is_some() {
            return Err(host::Error::Argument("the rank is connected".to_owned()));
        }
        // The memory's fabric reaches the same peers.
        let connected = self.memory.own.connect(peer, address, deadline);
        match connected.and_then(|()| self.fabric.connect(peer, address, deadline)) {
            Err(error) if has(Flaw::AnyAddressConnects) && error.kind() == ErrorKind::Mismatch => {
                Ok(())
            }
            answer => answer,
        }
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.fabric.link(peer)
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, host::Error> {
        let rank = if has(Flaw::ReopensAsItself) { self.rank() } else { rank };
        Self::over(self.fabric.reopen(rank, ranks)?, self.memory.own.reopen(rank, ranks)?)
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, host::Error> {
        let mut offers = self.fabric.offers()?;
        if has(Flaw::OffersMore) {
            offers[0].caps.slice_ops_max += 1;
        }
        Ok(offers)
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<host::Engine, host::Error> {
        let kind = requirements.kind.filter(|_| !has(Flaw::TakesAnyKind));
        self.fabric.engine(EngineRequirements { kind, ..requirements })
    }
}
