// Looks at the status page at the widths of a desktop and of a phone, light and dark,
// once it shows so many problems, and prints what it found.
//
//	node outage.mjs <chromium> <url> <number of problems> <folder for screenshots> <name of the screenshots>
import {close, launch, open, patience, problems} from './browser.mjs';

const [executablePath, url, expected, folder, title] = process.argv.slice(2);
const browser = await launch(executablePath);

async function look(width, colorScheme) {
	const name = `${width}-${colorScheme}`;
	const opened = await open(browser, name, url, {viewport: {width, height: 900}, colorScheme}), {page, report} = opened;
	await page.waitForFunction((n) => document.querySelectorAll('.problems li').length === n, Number(expected), {timeout: patience});
	report.shown = {problems: await page.locator('.problems li').allInnerTexts()};
	await page.screenshot({path: `${folder}/${title}-${name}.png`, fullPage: true});
	report.problems = await problems(page);
	return close(opened);
}

const looked = [];
for (const width of [1440, 390]) for (const scheme of ['light', 'dark']) looked.push(await look(width, scheme));
console.log(JSON.stringify(looked));
await browser.close();
