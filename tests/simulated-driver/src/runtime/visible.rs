//! Selects the devices that a process sees, by variables such as `CUDA_VISIBLE_DEVICES`.

/// Returns the selected ones of `devices`, up to the first entry that names none of them.
///
/// An entry is an index in `devices`, or the beginning of a device's name.
pub(crate) fn parse(
    selection: Option<&str>,
    devices: &[u32],
    name: impl Fn(u32) -> String,
) -> Vec<u32> {
    let Some(selection) = selection else { return devices.to_vec() };
    let mut visible = Vec::new();
    for entry in selection.split(',').map(str::trim) {
        let found = match entry.parse::<usize>() {
            Ok(place) => devices.get(place).copied(),
            Err(_) if entry.len() > "GPU-".len() => {
                devices.iter().copied().find(|device| name(*device).starts_with(entry))
            }
            Err(_) => None,
        };
        let Some(device) = found else { break };
        // A device that is named twice makes the whole list void.
        if visible.contains(&device) {
            return Vec::new();
        }
        visible.push(device);
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::pci::uuid_text;

    fn visible(selection: &str) -> Vec<u32> {
        parse(Some(selection), &[0, 1, 2, 3], uuid_text)
    }

    #[test]
    fn visible_devices_are_parsed_as_the_vendors_do() {
        assert_eq!(parse(None, &[0, 1, 2], uuid_text), [0, 1, 2]);
        assert_eq!(visible("3,1"), [3, 1]);
        assert_eq!(visible("1,9,2"), [1]);
        assert_eq!(visible("-1"), []);
        assert_eq!(visible(""), []);
        assert_eq!(visible("2,2"), []);
        assert_eq!(visible(&uuid_text(2)), [2]);
        assert_eq!(visible("GPU-0000"), []);
        assert_eq!(parse(Some("1"), &[3, 2], uuid_text), [2]);
    }
}
