//! Writes an initial root file system in the "newc" format of cpio.

/// A cpio archive under construction.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

/// Mode of a directory.
const FOLDER: u32 = 0o040_755;
/// Mode of an executable file.
const FILE: u32 = 0o100_755;
/// Mode of a symbolic link.
const LINK: u32 = 0o120_777;
/// Mode of a character device.
const CHARACTER: u32 = 0o020_600;

impl Archive {
    /// Adds a folder; its parent must be there.
    pub(crate) fn folder(&mut self, path: &str) {
        self.entry(path, FOLDER, (0, 0), &[]);
    }

    /// Adds a file; its folder must be there.
    pub(crate) fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, FILE, (0, 0), content);
    }

    /// Adds a link to `target`.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.entry(path, LINK, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER, (major, minor), &[]);
    }

    /// Returns the finished archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        let path = path.trim_start_matches('/');
        self.entries += 1;
        let bytes = u32::try_from(content.len()).expect("a file of the archive is below 4 GiB");
        let name_bytes = u32::try_from(path.len() + 1).expect("a path is short");
        // Inode, mode, user, group, links, time, size, device (2), device number (2), name length, checksum.
        let fields =
            [self.entries, mode, 0, 0, 1, 0, bytes, 0, 0, device.0, device.1, name_bytes, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_end_with_a_trailer() {
        let mut archive = Archive::default();
        archive.folder("/bin");
        archive.file("/bin/a", b"12345");
        let bytes = archive.finish();
        let text = String::from_utf8(bytes.clone()).unwrap();
        assert!(text.starts_with("07070100000001000041ed"), "{text}");
        // 110 bytes of header and `bin` with its end; then the file's own header.
        assert_eq!(&text[110..114], "bin\0");
        assert_eq!(text[116..].find("070701"), Some(0), "{text}");
        // The file's content follows its padded name, and is padded to the trailer's header.
        assert_eq!(&text[226..232], "bin/a\0");
        let content = text.find("12345").unwrap();
        assert_eq!(content % 4, 0);
        assert_eq!(&text[content + 8..content + 14], "070701");
        assert!(text.contains("TRAILER!!!\0"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
