//! Finds the processes that listen at a port of this host.

use std::fs;

/// Returns the processes that listen at a TCP port, each as a text such as `process 17 (python3)`.
///
/// The list is empty if this process cannot see them, because they belong to another user or to
/// another process namespace.
pub(super) fn holders(port: u16) -> Vec<String> {
    let sockets: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| listening(&table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    if sockets.is_empty() {
        return Vec::new();
    }

    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| holds(*pid, &sockets)).map(named).collect()
}

/// Returns whether the process `pid` has a descriptor of one of `sockets`, such as `socket:[31]`.
fn holds(pid: u32, sockets: &[String]) -> bool {
    // The folder cannot be read if the process has ended or belongs to another user.
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.any(|target| sockets.iter().any(|socket| target.as_os_str() == socket.as_str()))
}

fn named(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim().escape_debug()),
        Err(_) => format!("process {pid}"),
    }
}

/// Returns the inodes of the sockets that listen at a port, from a table such as `/proc/net/tcp`.
fn listening(table: &str, port: u16) -> Vec<String> {
    table.lines().filter_map(|line| listening_inode(line, port)).collect()
}

/// Returns the inode of the socket in a line of `/proc/net/tcp`, if the socket listens at `port`.
fn listening_inode(line: &str, port: u16) -> Option<String> {
    // The fields are: index, local address, remote address, state, five others, inode.
    let mut fields = line.split_ascii_whitespace().skip(1);
    let local_port = fields.next()?.rsplit_once(':')?.1;
    let state = fields.nth(1)?;
    let inode = fields.nth(5)?;

    // The number of the state LISTEN is 10.
    let listens = state == "0A";
    let is_at_port = u16::from_str_radix(local_port, 16) == Ok(port);
    (listens && is_at_port).then(|| inode.to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_process_that_listens_is_named() {
        for address in ["127.0.0.1:0", "[::]:0"] {
            // A host may have no IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            let found = holders(port);
            let own = format!("process {} (", std::process::id());
            assert!(found.iter().any(|found| found.starts_with(&own)), "{address}: {found:?}");
        }
    }

    #[test]
    fn only_sockets_that_listen_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:752D 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 31 1 0 100 0 0 10 0\n   \
                     1: 0100007F:752D 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1000        0 32 1 0 20 4 30 10 -1\n";
        assert_eq!(listening(table, 0x752d), ["31"]);
        assert!(listening(table, 80).is_empty());
    }
}
