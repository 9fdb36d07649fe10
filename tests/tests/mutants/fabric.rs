//! Wraps fabrics of the host backend and breaks one rule of their keys, imports or addresses.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerlane_hal::{
    BackendId, Deadline, DynRegion, EngineRequirements, Error as _, ErrorKind, Fabric, Generation,
    KeyError, Link, PeerMemory, Rank, Region, RemoteKey, Role,
};
use peerlane_host as host;
use peerlane_tests::Harness;

/// The broken rule; a number, since a key is decoded without an object at hand.
pub(crate) mod flaw {
    /// Bytes that are no key make a key of nothing.
    pub(crate) const ANY_BYTES_ARE_A_KEY: u8 = 0;
    /// Bytes that are no key panic.
    pub(crate) const NO_KEY_PANICS: u8 = 1;
    /// A key that travelled names a byte more.
    pub(crate) const KEYS_GROW: u8 = 2;
    /// A refused key opens other memory.
    pub(crate) const FREED_KEYS_OPEN: u8 = 3;
    /// One's own key opens a copy.
    pub(crate) const ALIASES_ARE_COPIES: u8 = 4;
    /// Registered memory is other memory.
    pub(crate) const REGISTERED_IS_COPIED: u8 = 6;
    /// A malformed address is connected to nobody.
    pub(crate) const ANY_ADDRESS_CONNECTS: u8 = 5;
    /// Flags are as an earlier region left them.
    pub(crate) const REUSED_AS_IT_WAS: u8 = 7;
    /// New memory is as an earlier owner left it.
    pub(crate) const ALLOCATES_DIRTY: u8 = 9;
    /// Any address is taken for one of this device.
    pub(crate) const ADOPTS_ANY_ADDRESS: u8 = 10;
    /// A key is imported without a connection.
    pub(crate) const IMPORTS_UNCONNECTED: u8 = 11;
    /// Flags in memory of the host are refused.
    pub(crate) const REFUSES_FLAGS_OF_THE_HOST: u8 = 12;
    /// Memory of no bytes is refused.
    pub(crate) const REFUSES_NO_BYTES: u8 = 13;
    /// A second connection to a peer is refused.
    pub(crate) const CONNECTS_ONCE: u8 = 14;
    /// A fabric is reopened as the rank that it was.
    pub(crate) const REOPENS_AS_ITSELF: u8 = 8;
}

/// The harness of a broken fabric.
pub(crate) struct FabricMutant<const FLAW: u8> {
    pub(crate) timeout: Duration,
}

impl<const FLAW: u8> Harness for FabricMutant<FLAW> {
    type Fabric = Flawed<FLAW>;

    fn name(&self) -> &str {
        "mutant"
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Flawed<FLAW>, host::Error> {
        let fabric = host::Fabric::open(rank, ranks)?;
        // Memory of a second fabric, since the first cannot be borrowed and wrapped at once.
        Flawed::over(fabric, host::Fabric::open(rank, ranks)?)
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }
}

pub(crate) struct Flawed<const FLAW: u8> {
    memory: FlawedMemory<FLAW>,
    fabric: host::Fabric,
}

impl<const FLAW: u8> Flawed<FLAW> {
    fn over(fabric: host::Fabric, mut own: host::Fabric) -> Result<Self, host::Error> {
        let address = own.address();
        own.connect(own.rank(), &address, Deadline::after(Duration::from_secs(5)))?;
        Ok(Self { memory: FlawedMemory { own }, fabric })
    }
}

pub(crate) struct FlawedMemory<const FLAW: u8> {
    own: host::Fabric,
}

/// `None`: no key, taken for one.
pub(crate) struct FlawedKey<const FLAW: u8> {
    key: Option<host::Key>,
    travelled: bool,
}

impl<const FLAW: u8> RemoteKey for FlawedKey<FLAW> {
    fn encode(&self) -> Vec<u8> {
        self.key.as_ref().map_or_else(Vec::new, RemoteKey::encode)
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let key = host::Key::decode(bytes);
        match FLAW {
            flaw::ANY_BYTES_ARE_A_KEY => Ok(Self { key: key.ok(), travelled: true }),
            flaw::NO_KEY_PANICS => {
                Ok(Self { key: Some(key.expect("bytes are a key")), travelled: true })
            }
            _ => key.map(|key| Self { key: Some(key), travelled: true }),
        }
    }

    fn region_bytes(&self) -> u64 {
        let more = u64::from(FLAW == flaw::KEYS_GROW && self.travelled);
        self.key.as_ref().map_or(0, RemoteKey::region_bytes) + more
    }

    fn generation(&self) -> Generation {
        self.key.as_ref().map_or(Generation(0), RemoteKey::generation)
    }
}

impl<const FLAW: u8> FlawedMemory<FLAW> {
    /// Some memory, only not that of the key.
    fn other(&self, bytes: u64, deadline: Deadline) -> Result<host::Remote, host::Error> {
        let memory = self.own.memory();
        let local = memory.allocate(bytes, Role::Data)?;
        let key = memory.export(&local)?;
        memory.import(self.own.rank(), &key, deadline)
    }
}

// SAFETY: it breaks the contract only in ways that the checks of this test find, in memory of the test.
unsafe impl<const FLAW: u8> PeerMemory for FlawedMemory<FLAW> {
    type Error = host::Error;
    type Key = FlawedKey<FLAW>;
    type Local = host::Local;
    type Remote = host::Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<host::Local, host::Error> {
        if FLAW == flaw::REFUSES_NO_BYTES && bytes == 0 {
            return Err(host::Error::Argument("there must be a byte".to_owned()));
        }
        let region = self.own.memory().allocate(bytes, role)?;
        if FLAW == flaw::ALLOCATES_DIRTY && role == Role::Data {
            // SAFETY: the region is new, so nobody else accesses its bytes.
            unsafe { region.base().as_ptr().write_bytes(1, region.bytes() as usize) };
        }
        Ok(region)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<host::Local, host::Error> {
        let flags = self.own.memory().allocate_polled_flags(bytes)?;
        if FLAW == flaw::REUSED_AS_IT_WAS {
            flags.flags().into_iter().flatten().for_each(|flag| flag.store(1, Ordering::Release));
        }
        Ok(flags)
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<host::Local, host::Error> {
        match FLAW {
            // SAFETY: the caller upholds the same contract.
            flaw::ADOPTS_ANY_ADDRESS => unsafe {
                self.register(region.base(), region.bytes(), role)
            },
            // SAFETY: as above.
            _ => unsafe { self.own.memory().adopt(region, role) },
        }
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<host::Local, host::Error> {
        if FLAW == flaw::REFUSES_FLAGS_OF_THE_HOST && role == Role::Flags {
            let text = "flags are in memory of the device only".to_owned();
            return Err(host::Error::Argument(text));
        }
        if FLAW == flaw::REGISTERED_IS_COPIED {
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
        if FLAW == flaw::ALIASES_ARE_COPIES && peer == self.own.rank() {
            return self.other(inner.region_bytes(), deadline);
        }
        match self.own.memory().import(peer, inner, deadline) {
            Err(error)
                if FLAW == flaw::FREED_KEYS_OPEN && error.kind() == ErrorKind::InvalidKey =>
            {
                self.other(inner.region_bytes(), deadline)
            }
            answer => answer,
        }
    }
}

// SAFETY: it breaks the contract only in ways that the checks of this test find, in memory of the test.
unsafe impl<const FLAW: u8> Fabric for Flawed<FLAW> {
    type Error = host::Error;
    type Memory = FlawedMemory<FLAW>;
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
        if FLAW == flaw::CONNECTS_ONCE && self.fabric.link(peer).is_some() {
            return Err(host::Error::Argument("the rank is connected".to_owned()));
        }
        // The memory's fabric reaches the same peers.
        let connected = self.memory.own.connect(peer, address, deadline);
        match connected.and_then(|()| self.fabric.connect(peer, address, deadline)) {
            Err(error)
                if FLAW == flaw::ANY_ADDRESS_CONNECTS && error.kind() == ErrorKind::Mismatch =>
            {
                Ok(())
            }
            answer => answer,
        }
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.fabric.link(peer)
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, host::Error> {
        let rank = if FLAW == flaw::REOPENS_AS_ITSELF { self.rank() } else { rank };
        Self::over(self.fabric.reopen(rank, ranks)?, self.memory.own.reopen(rank, ranks)?)
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<host::Engine, host::Error> {
        self.fabric.engine(requirements)
    }
}
