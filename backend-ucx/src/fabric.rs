//! Opens UCX for a rank, and connects the rank to its peers.

use std::sync::Arc;

use peerlane_hal::{
    BackendId, Deadline, EngineOffer, EngineRequirements, Fabric as FabricTrait, Link, LinkKind,
    Rank,
};
use peerlane_toolkit::Fault;
use peerlane_toolkit::handover::Host;

use crate::device;
use crate::engine::Engine;
use crate::error::Error;
use crate::memory::Memory;
use crate::network::{Address, Network};
use crate::options::Options;
use crate::sys::Context;

/// Connects a rank to its peers over the networks that UCX drives.
#[derive(Debug)]
pub struct Fabric {
    memory: Memory,
    options: Options,
    address: Address,
    /// The addresses of the connected ranks.
    connected: Vec<Option<Vec<u8>>>,
}

impl Fabric {
    /// Opens the fabric of rank `rank` in a group of `ranks` ranks, on the devices that UCX or its
    /// variables choose.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): libucp is missing or too old, or has
    /// no transport. [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): there is no
    /// such rank.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options::default())
    }

    /// Opens the fabric of rank `rank` in a group of `ranks` ranks with the given options.
    ///
    /// # Errors
    /// As [`open`](Self::open), and
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) for options that are out of
    /// range.
    pub fn open_with(rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        if rank.index() >= ranks {
            let text =
                format!("rank is {rank}, expected a rank below {ranks}, the number of ranks");
            return Err(Error::argument(text));
        }
        options.check()?;

        let context = Context::open(&options)?;
        let token = random_token()?;
        let (network, worker) = Network::open(&context, (rank, ranks), token)?;
        let address = Address {
            rank,
            ranks: u32::try_from(ranks).unwrap_or(u32::MAX),
            token,
            version: context.version(),
            host: Host::own().clone(),
            interfaces: device::addresses(&device::networks(&context)).join(", "),
            worker,
        };
        let memory = Memory { network: Arc::new(network) };

        Ok(Self { memory, options, address, connected: vec![None; ranks] })
    }
}

fn random_token() -> Result<u64, Error> {
    let mut token = [0; 8];
    rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Error::io("read random bytes")(errno.into()))?;
    Ok(u64::from_ne_bytes(token))
}

/// Returns the major and minor number of a version.
fn series(version: &str) -> Option<(&str, &str)> {
    let mut numbers = version.split('.');
    Some((numbers.next()?, numbers.next()?))
}

// SAFETY: the rank is constant, and memory and engines uphold their contracts.
unsafe impl FabricTrait for Fabric {
    type Error = Error;
    type Memory = Memory;
    type Engine = Engine;

    fn backend(&self) -> BackendId {
        BackendId::UCX
    }

    fn rank(&self) -> Rank {
        self.address.rank
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.address.encode()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        let Address { rank, ranks, token, .. } = self.address;
        let own = &self.address;
        let Some(connected) = self.connected.get_mut(peer.index()) else {
            let text =
                format!("peer is {peer}, expected a rank below {ranks}, the number of ranks");
            return Err(Error::argument(text));
        };
        if connected.as_deref() == Some(address) {
            return Ok(());
        }

        let decoded = Address::decode(peer, address)?;
        if decoded.ranks != ranks {
            return Err(Error::mismatch(format!(
                "rank {peer} opened the fabric for {} ranks, rank {rank} for {ranks}",
                decoded.ranks
            )));
        }
        if series(&decoded.version) != series(&own.version) {
            return Err(Error::mismatch(format!(
                "rank {peer} at {} has libucp of UCX {}, rank {rank} at {} that of UCX {}; install the same version on all \
                 hosts",
                decoded.location(),
                decoded.version,
                own.location(),
                own.version
            )));
        }
        if peer != rank {
            self.memory.network.hello(&decoded, deadline)?;
        } else if decoded.token != token {
            return Err(Error::mismatch(format!(
                "rank {peer} is this one, and the address is of another fabric that it opened"
            )));
        }

        self.memory.network.add_peer(peer, decoded);
        *connected = Some(address.to_vec());
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.memory.network.peer(peer).ok()?;
        let kind = if peer == self.rank() { LinkKind::Local } else { LinkKind::Network };
        Some(Link { peer, kind, bytes_per_second: None })
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, self.options.clone())
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        Ok(vec![EngineOffer::new(Engine::offered_caps(&self.options))])
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Engine, Error> {
        let offers = self.offers()?;
        requirements.select(&offers).map_err(Fault::Argument)?;
        Engine::open(&self.memory.network, &self.options)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use peerlane_hal::{At, CopyEngine as _, Error as _, ErrorKind, Op, PeerMemory as _, Role};
    use peerlane_test_support::not_covered;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    #[test]
    fn another_version_of_ucx_is_refused() {
        let Ok(mut fabric) = Fabric::open(Rank(0), 2) else {
            return not_covered("another_version_of_ucx_is_refused", "there is no libucp");
        };
        let version = "1.99.0".to_owned();
        let other = Address { rank: Rank(1), version, ..fabric.address.clone() };
        let error = fabric.connect(Rank(1), &other.encode(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        let text = error.to_string();
        assert!(text.contains("has libucp of UCX 1.99.0, rank 0 at "), "{text}");
        assert!(text.ends_with("install the same version on all hosts"), "{text}");
    }

    #[test]
    fn devices_and_transports_that_do_not_exist_are_named() {
        let name = "devices_and_transports_that_do_not_exist_are_named";
        if crate::version().is_err() {
            return not_covered(name, "there is no libucp");
        }
        let devices = vec!["nosuch0".to_owned()];
        let transports = vec!["tcp".to_owned()];
        let options = Options { devices, transports, ..Options::default() };
        let error = Fabric::open_with(Rank(0), 2, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        let expected = "has no transport for the devices nosuch0 with the transports tcp: ";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_rank_that_has_ended_is_lost_within_the_deadline() {
        let (Ok(mut fabric), Ok(other)) = (Fabric::open(Rank(0), 2), Fabric::open(Rank(1), 2))
        else {
            return not_covered("a_rank_that_has_ended_is_lost_within_the_deadline", "no libucp");
        };
        let address = other.address();
        drop(other);
        let error = fabric.connect(Rank(1), &address, soon()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Timeout), "{error}");
        assert!(error.to_string().contains("rank 1"), "{error}");
    }

    #[test]
    fn an_engine_whose_put_has_failed_ends_at_once() {
        let name = "an_engine_whose_put_has_failed_ends_at_once";
        let (Ok(mut fabric), Ok(mut other)) = (Fabric::open(Rank(0), 2), Fabric::open(Rank(1), 2))
        else {
            return not_covered(name, "there is no libucp");
        };
        // The peer answers by its thread.
        fabric.connect(Rank(1), &other.address(), soon()).unwrap();
        other.connect(Rank(0), &fabric.address(), soon()).unwrap();
        let far = other.memory().allocate(64, Role::Data).unwrap();
        let key = other.memory().export(&far).unwrap();
        let far_import = fabric.memory().import(Rank(1), &key, soon()).unwrap();
        let near = fabric.memory().allocate(64, Role::Data).unwrap();
        let mut engine = fabric.engine(EngineRequirements::default()).unwrap();
        // As if the peer had taken no bytes for a long time.
        fabric.memory.network.lock().abandon(Rank(1));

        let put = Op::Put {
            dst: At { region: &far_import, offset: 0 },
            src: At { region: &near, offset: 32 },
            bytes: 8,
        };
        // SAFETY: the regions live, and nobody else uses them.
        let error = unsafe { engine.submit(&[put]) }.unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))), "{error}");
        let begun = std::time::Instant::now();
        drop(engine);
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    }
}
