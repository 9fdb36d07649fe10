//! Forms a smaller group of the ranks that remain after a rank was lost.
//!
//! The hub of the new group collects the hellos of the remaining ranks and answers them all at
//! once: when every rank has arrived whose process still runs, or when its time has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use peerlane_hal::{Deadline, Rank};

use super::handshake::{GroupId, Hello, Refusal};

/// Collects the ranks that arrive for a shrink, until the smaller group is formed.
pub(super) struct Formation {
    /// The id of the group that shrinks.
    group: GroupId,
    /// The number of ranks of the group that shrinks.
    ranks: usize,
    /// The ranks that may take part, and the addresses at which they listen.
    remaining: Vec<(Rank, SocketAddr)>,
    /// The number of the connection of each rank that has arrived.
    arrived: BTreeMap<Rank, u64>,
    /// The earlier numbers of the ranks of the formed group, in order, and the numbers of their
    /// connections.
    members: Option<Vec<(Rank, u64)>>,
}

impl Formation {
    pub(super) fn new(group: GroupId, ranks: usize, remaining: Vec<(Rank, SocketAddr)>) -> Self {
        Self { group, ranks, remaining, arrived: BTreeMap::new(), members: None }
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Counts the rank of `hello` as arrived over the connection `number`, or returns why it cannot
    /// take part.
    ///
    /// A later connection of a rank replaces an earlier one, which the rank has given up.
    pub(super) fn arrive(&mut self, hello: &Hello, number: u64) -> Result<(), Refusal> {
        if hello.shrinks != Some(self.group) || hello.ranks as usize != self.ranks {
            return Err(Refusal::OtherGroup);
        }

        let rank = Rank(hello.rank);
        let may_join = self.remaining.iter().any(|(remaining, _)| *remaining == rank);
        if self.members.is_some() || !may_join {
            return Err(Refusal::ShrunkWithout { rank: rank.0 });
        }

        self.arrived.insert(rank, number);
        Ok(())
    }

    fn absent(&self) -> impl Iterator<Item = (Rank, SocketAddr)> {
        let remaining = self.remaining.iter().copied();
        remaining.filter(|(rank, _)| !self.arrived.contains_key(rank))
    }

    /// Forms the group of the ranks that have arrived, in the order of their numbers.
    pub(super) fn form(&mut self) {
        self.members = Some(std::mem::take(&mut self.arrived).into_iter().collect());
    }

    /// Returns the number of ranks of the formed group; `None` before it is formed.
    pub(super) fn formed_ranks(&self) -> Option<usize> {
        self.members.as_ref().map(Vec::len)
    }

    /// Returns the new number of the rank whose earlier number is `rank`, if it arrived over the
    /// connection `number`.
    pub(super) fn member(&self, rank: u32, number: u64) -> Result<Rank, Refusal> {
        let members = self.members.as_deref().unwrap_or_default();
        let index = members.iter().position(|member| *member == (Rank(rank), number));
        index.map(Rank::at).ok_or(Refusal::Closing)
    }
}

/// Detects which ranks are gone, by connecting to their listeners.
#[derive(Default)]
pub(super) struct Probes {
    connections: BTreeMap<Rank, TcpStream>,
    hosts_down: BTreeSet<IpAddr>,
}

impl Probes {
    /// Returns whether a rank is gone, because its process has ended or its host does not answer.
    ///
    /// Its process has ended if no process listens at `address` any more. A host does not answer if
    /// it is silent for an eighth of the time until the deadline.
    pub(super) fn is_gone(
        &mut self,
        (rank, address): (Rank, SocketAddr),
        deadline: Deadline,
    ) -> bool {
        use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable, TimedOut};

        if self.hosts_down.contains(&address.ip()) {
            return true;
        }

        // The kernel closes the connections of a process that ends, so a rank with an open one
        // counts as running.
        if self.connections.get(&rank).is_some_and(is_open) {
            return false;
        }

        // A connection that has closed proves nothing: the rank closes those that are too many or
        // have waited too long. So the rank is asked anew.
        self.connections.remove(&rank);
        // A timeout of zero would be an error.
        let timeout = (deadline.remaining() / 8).max(Duration::from_millis(1));
        let connected = TcpStream::connect_timeout(&address, timeout)
            .and_then(|stream| stream.set_nonblocking(true).map(|()| stream));

        match connected {
            // TCP can connect a port of this host to itself if no process listens at it.
            Ok(stream) if stream.local_addr().is_ok_and(|own| own == address) => true,
            Ok(stream) => {
                self.connections.insert(rank, stream);
                false
            }
            Err(error) => match error.kind() {
                ConnectionRefused => true,
                TimedOut | HostUnreachable | NetworkUnreachable => {
                    self.hosts_down.insert(address.ip());
                    true
                }
                // Other errors prove nothing, because this side can be at fault, for example if
                // descriptors have run out.
                _ => false,
            },
        }
    }

    pub(super) fn are_gone(&mut self, absent: &[(Rank, SocketAddr)], deadline: Deadline) -> bool {
        absent.iter().all(|rank| self.is_gone(*rank, deadline))
    }
}

/// Returns whether a connection is still open at the other end.
fn is_open(connection: &TcpStream) -> bool {
    use io::ErrorKind::{Interrupted, WouldBlock};

    // The connection does not block, so an open one without data has an error too.
    match connection.peek(&mut [0]) {
        Ok(bytes) => bytes > 0,
        Err(error) => matches!(error.kind(), WouldBlock | Interrupted),
    }
}

/// Returns the ranks that have not arrived for a shrink, or `None` if no group awaits its ranks.
pub(super) fn absent(formation: Option<&Formation>) -> Option<Vec<(Rank, SocketAddr)>> {
    let formation = formation.filter(|formation| formation.members.is_none())?;
    Some(formation.absent().collect())
}
