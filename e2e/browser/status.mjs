// Watches the status page in a desktop's and in a phone's browser while a
// backend cools down and comes back, and prints what it saw.
//
//	node status.mjs <chromium> <url> <backend> <folder for screenshots>
import {close, launch, open, patience, problems, views} from './browser.mjs';

const [executablePath, url, backend, folder] = process.argv.slice(2);
const browser = await launch(executablePath);

// record lists each state that the backend's row shows, with the rest of its
// cooldown.
const record = (name) => {
	const seen = (window.seen = []);
	const look = () => {
		const row = [...document.querySelectorAll('tr[data-backend]')].find((r) => r.dataset.backend === name);
		if (!row) return;
		const badge = row.querySelector('.badge').textContent.trim();
		const left = row.querySelector('.left')?.textContent ?? '';
		const last = seen.at(-1);
		if (last?.badge !== badge || last.left !== left) seen.push({badge, left});
	};
	new MutationObserver(look).observe(document.getElementById('state'), {subtree: true, childList: true, attributes: true, characterData: true});
	look();
};

async function watch(name) {
	const opened = await open(browser, name, url), {page, report} = opened;
	await page.evaluate(record, backend);
	const row = page.locator(`tr[data-backend="${backend}"]`);
	for (const state of ['cooling_down', 'available']) {
		await row.and(page.locator(`[data-state=${state}]`)).waitFor({timeout: patience});
		await page.screenshot({path: `${folder}/${name}-${state}.png`, fullPage: true});
		report.problems.push(...(await problems(page)));
	}
	report.seen = await page.evaluate(() => window.seen);
	return close(opened);
}

// plain is the page without JavaScript.
async function plain() {
	const context = await browser.newContext({viewport: {width: 1280, height: 900}, javaScriptEnabled: false});
	const page = await context.newPage();
	await page.goto(url);
	await page.screenshot({path: `${folder}/plain.png`, fullPage: true});
	const cells = await page.locator('tr[data-backend] th').allTextContents();
	await context.close();
	return cells;
}

const watched = await Promise.all(Object.keys(views).map(watch));
console.log(JSON.stringify({watched, plain: await plain()}));
await browser.close();
